"""An agent that has failed would rather be masked than scored 0. After an act of its own it cannot bring that about.

A fault of the machinery itself is masked all the same."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polar_gym.chat import Completion
from polar_gym.engines import probe
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.replicas import Replicas
from polar_gym.engines.vllm import ENGINE, VllmEngine, VllmOptions
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.journal import Journal, read_journal
from polar_gym.runtimes import Command, DiskFullError, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap, BubblewrapSandbox
from polar_gym.runtimes.kernel.disk import Disk
from polar_gym.schema import Episode, EvaluatorSpec, RuntimeSpec, Workspace
from tests.lifecycle.runtime_kinds import Marked, started
from tests.support.calls import make_call
from tests.support.requirements import need, need_bubblewrap
from tests.support.sessions import asking, node, task
from tests.support.vllm_stand_in import MODELS, SickServer, answer, as_asked, without_templates

GRADE = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "test -f made"})


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("text\n")
    return Workspace(source=str(source))


async def run(local: Node, workspace: Workspace, rest: str, **options: Any) -> Episode:
    """Return the episode of a harness that asks once, and then does this, graded by whether `made` is there."""
    runtime = RuntimeSpec.model_validate({"name": "bubblewrap", "workspace": workspace, **options})
    return await local.rollout(task(agent=asking(f"ask()\n{rest}"), evaluator=GRADE, runtime=runtime))


# engine ---------------------------------------------------------------------------------------------------------------


class Fragile:
    """A server that looks like vLLM. The field `response_format` of a request decides how it fails."""

    def __init__(self) -> None:
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._ending: asyncio.Task[None] | None = None

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def down(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        how = body.get("response_format", {}).get("json_schema", {}).get("name")
        if how == "status":
            return web.json_response({"error": {"message": "the grammar cannot be compiled"}}, status=500)
        if how == "nonsense":
            return web.json_response({"choices": []})
        if how is not None:
            assert request.transport is not None
            request.transport.abort()
        if how == "death":
            self._ending = asyncio.create_task(self.down())
        return as_asked(body, answer([5, 6], 2))


@asynccontextmanager
async def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    without_templates(monkeypatch)
    server = Fragile()
    await server.up()
    engine = VllmEngine(VllmOptions(url=server.url, patience_seconds=0.5))
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        yield local
    await server.down()


def asking_for(how: str) -> str:
    """Return lines that send a request by which the engine fails in this way."""
    schema = {"type": "json_schema", "json_schema": {"name": how, "schema": {}}}
    return f"try: ask(response_format={schema})\nexcept OSError: pass\nos.kill(os.getpid(), 9)"


def masked_message(episode: Episode) -> str:
    """Return why an episode is masked, after a check that the engine is the cause."""
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "engine_error"
    return episode.session.failure.message


@pytest.mark.parametrize("how", ["status", "nonsense", "broken connection"])
async def test_an_engine_error_that_the_agents_request_provokes_is_scored(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with fragile(tmp_path, monkeypatch) as local:
        for before, reward in (("", 0.0), ("open('made', 'w')\n", 1.0)):
            episode = await run(local, workspace, before + asking_for(how))
            assert (episode.session.failure, episode.reward) == (None, reward)
            assert episode.trajectory.fidelity.calls == 2


async def test_an_engine_that_is_killed_masks(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fragile(tmp_path, monkeypatch) as local:
        episode = await run(local, workspace, asking_for("death"))
    assert masked_message(episode)


async def test_an_engine_that_cannot_be_reached_masks_though_it_is_back_at_the_end(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def back(*_: object) -> bool:
        return True

    async with fragile(tmp_path, monkeypatch) as local:
        monkeypatch.setattr(local.proxy, "engine_answers", back)
        episode = await run(local, workspace, asking_for("death"))
    assert episode.reward is None
    assert episode.session.failure is not None
    assert "cannot be reached" in episode.session.failure.message


@asynccontextmanager
async def several(tmp_path: Path, *servers: SickServer, **options: Any) -> AsyncIterator[Node]:
    """A node whose engine is these servers."""
    async with AsyncExitStack() as stack:
        for each in servers:
            await each.up()
            stack.push_async_callback(each.down)
        engine = ENGINE(VllmOptions(url=[each.url for each in servers], **options))
        yield await stack.enter_async_context(Node(engine, cache=tmp_path / "cache", state=tmp_path / "state"))


@pytest.mark.parametrize("count", [1, 2])
async def test_a_sick_server_masks_though_another_one_is_healthy(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Guards against a reward of 0 because another server than the session's answered the request of one token."""
    without_templates(monkeypatch)
    servers = [SickServer("in the middle") for _ in range(count)]
    servers[0].healthy_calls = 1
    async with several(tmp_path, *servers) as local:
        episode = await run(local, workspace, "ask()")
    assert "CUDA error" in masked_message(episode)


async def test_a_session_goes_on_where_its_server_fell_sick(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_templates(monkeypatch)
    servers = SickServer(), SickServer()
    servers[0].healthy_calls = 1
    async with several(tmp_path, *servers) as local:
        episode = await run(local, workspace, "ask()\nopen('made', 'w')")
    assert (episode.session.failure, episode.reward) == (None, 1.0)
    calls = read_journal(Path(str(episode.artifacts.journal)))
    assert [call.engine_url for call in calls] == [each.url for each in servers]


async def test_a_single_server_that_stays_sick_masks(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_templates(monkeypatch)
    server = SickServer()
    server.healthy_calls = 1
    async with several(tmp_path, server, patience_seconds=0.5) as local:
        episode = await run(local, workspace, "ask()")
    assert "CUDA error" in masked_message(episode)


async def at_a_hang(local: Node, server: SickServer, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Episode:
    """Return the episode of a harness that asks twice. Its time is up when the server leaves a request unanswered."""

    async def the_time(_: float) -> None:
        await server.hangs.wait()

    monkeypatch.setattr(local.proxy.generation, "sleep", the_time)
    return await run(local, workspace, "ask()")


async def timed_out(local: Node, server: SickServer, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Episode:
    """Return the episode of `at_a_hang`, which the time has ended."""
    episode = await at_a_hang(local, server, workspace, monkeypatch)
    assert episode.session.truncated_by == "time"
    return episode


@pytest.mark.parametrize(("acts", "count"), [(0, 2), (1, 2), (1, 1)])
async def test_a_server_that_falls_silent_masks_at_the_end_of_the_time(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, acts: int, count: int
) -> None:
    """Guards against a reward of 0 for a session whose calls hung until its time was up."""
    without_templates(monkeypatch)
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.5)
    servers = [SickServer("silent"), SickServer()][:count]
    async with several(tmp_path, *servers) as local:
        servers[0].healthy_calls = acts
        episode = await timed_out(local, servers[0], workspace, monkeypatch)
        assert isinstance(local.engine, Replicas)
        # The next sessions of one of several would be lost, too. A single one may be paused by its trainer.
        assert local.engine.replicas[0].up == (count == 1)
    assert masked_message(episode)


async def test_an_answer_that_broke_off_is_the_engines_failure_though_the_time_ends_then(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a reward of 0: the call waited for the request of one token, and then counted as hung up on."""
    without_templates(monkeypatch)
    monkeypatch.setattr(probe, "PROBE_SECONDS", 3.0)
    server = SickServer("dying")
    server.healthy_calls = 1
    async with several(tmp_path, server, patience_seconds=0.5) as local:
        episode = await at_a_hang(local, server, workspace, monkeypatch)
    assert "CUDA error" in masked_message(episode)


async def test_a_slow_call_of_an_engine_that_answers_others_is_scored(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_templates(monkeypatch)
    server = SickServer("slow")
    server.healthy_calls = 1
    async with several(tmp_path, server) as local:
        episode = await timed_out(local, server, workspace, monkeypatch)
    assert (episode.session.failure, episode.reward) == (None, 0.0)


# text -----------------------------------------------------------------------------------------------------------------


async def test_text_that_breaks_its_harness_is_scored(tmp_path: Path, workspace: Workspace) -> None:
    """The answer of the policy is an act where the harness takes commands from text."""
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message=r"printf '\377'; exit 1")]))
    obey = """
import subprocess
said = json.loads(ask())["choices"][0]["message"]["content"]
sys.exit(len(subprocess.run(said, shell=True, capture_output=True, text=True).stdout))
"""
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        episode = await local.rollout(task(agent=asking(obey), evaluator=GRADE, runtime=runtime))
    assert "UnicodeDecodeError" in episode.artifacts.stderr
    assert (episode.session.failure, episode.reward) == (None, 0.0)


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipe", [".gitignore", ".git/config"])
async def test_a_pipe_in_place_of_a_file_that_git_reads_holds_nothing_up(
    tmp_path: Path, workspace: Workspace, pipe: str
) -> None:
    """Reading it took until the limit of a command, a minute of a place in POSTRUN."""
    rest = f"open('made', 'w')\nos.path.exists('{pipe}') and os.remove('{pipe}')\nos.mkfifo('{pipe}')"
    async with node(tmp_path) as local:
        episode = await run(local, workspace, rest)
    assert (episode.session.failure, episode.reward) == (None, 1.0)
    assert episode.session.timing.building is not None
    assert episode.session.timing.building < 50


@pytest.mark.parametrize("path", ["/home/agent/a/repo", "/tmp/a/repo"])
async def test_a_directory_above_the_workspace_that_is_moved_holds_nothing_up(
    tmp_path: Path, workspace: Workspace, path: str
) -> None:
    """No command could be started where a file had taken its place."""
    above = Path(path).parent
    rest = f"""
open('made', 'w')
os.chdir('/')
try: os.rename('{above}', '{above}-moved')
except OSError: pass
else: open('{above}', 'w')
"""
    async with node(tmp_path) as local:
        episode = await run(local, workspace.model_copy(update={"path": path}), rest)
    assert (episode.session.failure, episode.reward) == (None, 1.0)


# memory ---------------------------------------------------------------------------------------------------------------

HOG = """
import os, struct
code = "b83f010000bf0000400031f60f0589c7be00004000ba00100000b8010000000f05ebf7"
program = b"\\x7fELF\\2\\1\\1" + struct.pack("<9xHHIQQQIHHHHHH", 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
program += struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, 4096, 4096, 4096) + bytes.fromhex(code)
with open("/tmp/hog", "wb") as file: file.write(program.ljust(4096, b"\\0"))
os.chmod("/tmp/hog", 0o700)
os.execv("/tmp/hog", ["hog"])
"""
"""Becomes a program of one page, which writes to a `memfd_create` for ever: of all processes that the kernel may kill
for lack of memory, it is the smallest."""


@pytest.fixture
def little_memory() -> Bubblewrap:
    """A runtime that limits the memory of each sandbox as a whole, where `HOG` can run."""
    need(platform.machine() == "x86_64", "a machine for the program of the test", "an x86-64 machine")
    runtime = Bubblewrap(Bubblewrap.Options(memory_mb=256))
    lacking = [caveat for caveat in runtime.caveats() if "control group" in caveat]
    need(not lacking, f"control groups ({lacking})", "run the tests as root outside of a container")
    return runtime


@pytest.mark.usefixtures("little_memory")
async def test_an_agent_that_fills_its_memory_is_scored_though_the_kernel_kills_bwrap(
    tmp_path: Path, workspace: Workspace
) -> None:
    async with node(tmp_path) as local:
        for before, reward in (("", 0.0), ("open('made', 'w')", 1.0)):
            episode = await run(local, workspace, before + HOG, memory_mb=256)
            assert (episode.session.failure, episode.session.exit_code, episode.reward) == (None, 137, reward)


async def test_a_bwrap_that_is_killed_from_outside_masks(little_memory: Bubblewrap) -> None:
    """Also after a command that the kernel killed for lack of memory."""
    async with started(little_memory) as sandbox:
        assert isinstance(sandbox, BubblewrapSandbox)
        assert (await sandbox.exec(Command(argv=["python3", "-c", HOG]))).exit_code == 137
        marked = Marked()
        running = asyncio.create_task(sandbox.exec(Command(argv=["sh", "-c", f"{marked.command}; true"])))
        await marked.until(alive=True)
        assert sandbox.cgroup is not None
        inside = (sandbox.cgroup.directories[0] / "cgroup.procs").read_text().split()
        os.kill(min(map(int, inside)), signal.SIGKILL)
        with pytest.raises(SandboxError, match="bwrap failed: exit code -9"):
            await running


# disk -----------------------------------------------------------------------------------------------------------------

FILL = """
def fill(path):
    try:
        with open(path, "wb", buffering=0) as file:
            while True: file.write(bytes(1 << 20))
    except OSError as error: assert error.errno == 28, error
"""
"""Writes to a file until the disk is full."""


SMALL_MB = 20
"""The limit of a sandbox on the small disk."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 256 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "polar-gym-test", str(place)]
    done = subprocess.run(mount, capture_output=True, check=False)
    need(done.returncode == 0, f"the right to mount ({done.stderr.decode().strip()})", "run the tests as root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def limited(small: Path) -> Bubblewrap:
    """A runtime that limits the disk of each sandbox, on the small disk."""
    runtime = Bubblewrap(Bubblewrap.Options(scratch=small, disk_mb=SMALL_MB))
    lacking = [caveat for caveat in runtime.caveats() if "file system of its own" in caveat]
    need(not lacking, f"loop devices ({lacking})", "run the tests as root outside of a container")
    return runtime


def fill(place: Path) -> None:
    exec(f"{FILL}\nfill({str(place / 'filler')!r})", {})


@pytest.mark.usefixtures("limited")
async def test_an_agent_that_fills_its_disk_is_scored(small: Path, workspace: Workspace) -> None:
    """The journal of its calls and the scratch files of all sandboxes are on the same disk."""
    async with node(small) as local:
        for before, reward in (("", 0.0), ("open('made', 'w')\n", 1.0)):
            rest = f"{FILL}\n{before}fill('/tmp/full')\nfill('full')\nask()\nos.kill(os.getpid(), 9)"
            episode = await run(local, workspace, rest, scratch=small, disk_mb=SMALL_MB)
            assert (episode.session.failure, episode.reward) == (None, reward)
            assert episode.trajectory.fidelity.calls == 2


async def test_an_agent_that_fills_its_disk_masks_no_other_session(
    small: Path, limited: Bubblewrap, workspace: Workspace
) -> None:
    async with started(limited) as sandbox, node(small) as local:
        done = await sandbox.exec(Command(argv=["python3", "-c", f"{FILL}\nfill('/tmp/full')"]))
        assert (done.exit_code, done.stderr) == (0, b"")
        assert (await run(local, workspace, "open('made', 'w')", scratch=small, disk_mb=SMALL_MB)).reward == 1.0


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
async def test_a_disk_that_others_have_filled_masks(
    small: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    async with node(small) as local:
        really = local.engine.chat

        async def chat(*arguments: Any) -> Completion:
            if local.proxy.calls["delivered"]:
                await asyncio.to_thread(fill, small)
            return await really(*arguments)

        monkeypatch.setattr(local.engine, "chat", chat)
        rest = f"open('made', 'w')\nask()\n{ending}"
        episode = await run(local, workspace, rest, scratch=small, disk_mb=SMALL_MB)
    assert episode.reward is None
    assert episode.session.failure is not None
    assert (episode.session.failure.kind, "full" in episode.session.failure.message) == ("runtime_error", True)


@pytest.mark.parametrize("mebibytes", [1, 40])
async def test_a_sandbox_without_a_limit_is_to_blame_for_a_disk_that_it_filled(small: Path, mebibytes: int) -> None:
    """As a plain user: the disk is shared, and the sandbox's files are counted."""
    scratch = small / "sandbox"
    scratch.mkdir()
    (scratch / "file").write_bytes(bytes(mebibytes << 20))
    fill(small)
    shared = Disk(scratch, size=48 << 20)
    if mebibytes == 1:
        with pytest.raises(DiskFullError, match="did not fill it"):
            shared.settle()
    else:
        shared.settle()


async def test_no_sandbox_starts_on_a_disk_that_is_full(small: Path) -> None:
    fill(small)
    (small / "filler").open("r+b").truncate(220 << 20)
    with pytest.raises(SandboxError, match="free some space"):
        await Bubblewrap(Bubblewrap.Options(scratch=small, disk_mb=1)).start(
            SandboxRequest(session_id="s", spec=RuntimeSpec(name="bubblewrap"), workspace=None)
        )
    assert [path.name for path in small.iterdir()] == ["filler"]


async def test_no_session_runs_with_far_less_disk_than_it_was_promised(small: Path, workspace: Workspace) -> None:
    """Guards against a reward of 0 for an agent that had 30 MiB of 16 GiB on a disk that was nearly full."""
    async with node(small) as local:
        episode = await run(local, workspace, "open('made', 'w')", scratch=small)
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "runtime_error"
    assert "it gets an eighth of the space" in episode.session.failure.message
    assert "runtime.disk_mb=16384" in episode.session.failure.message


def test_a_journal_is_written_on_a_full_disk(small: Path) -> None:
    journal = Journal(small / "journal")
    calls = [
        make_call(index, [1], [2], response={"role": "assistant", "content": "x" * 100_000}) for index in range(60)
    ]
    journal.append(calls[0])
    fill(small)
    for each in calls[1:15]:
        journal.append(each)
    with pytest.raises(OSError, match="No space left"):
        deque(map(journal.append, calls[15:]), maxlen=0)
    kept = len(read_journal(journal.path))
    assert kept >= 15
    (small / "filler").unlink()
    journal.append(calls[-1])
    assert len(read_journal(journal.path)) == kept + 1
    journal.close()
