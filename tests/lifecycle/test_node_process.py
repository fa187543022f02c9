"""A gateway process that is killed, stopped, or started twice: nothing that it said it had is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar_gym.cli import main
from polar_gym.errors import ConfigError
from polar_gym.http.keys import NODE_KEY, take_key
from polar_gym.schema import RuntimeSpec, Status
from tests.lifecycle.nodes import KEY, Client, NodeProcess, client, order
from tests.lifecycle.runtime_kinds import Marked
from tests.support.processes import free_port
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking
from tests.support.tools import BASH

WORKING = asking("ask(); import time; time.sleep(60)")


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[NodeProcess]:
    need_bubblewrap()
    process = NodeProcess(tmp_path / "node", free_port())
    yield process
    await process.kill()


async def asked(process: NodeProcess, session_id: str) -> Path:
    """Wait until a session's first call is in its journal."""
    journal = process.directory / "state" / "sessions" / f"{session_id}.0" / "calls.jsonl"
    async with asyncio.timeout(60):
        while not journal.read_bytes().endswith(b"\n"):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
    return journal


async def begin(node: Client, process: NodeProcess) -> Path:
    """One session that runs and has made a call, and one that waits behind it; the journal of the first."""
    await node.put(order("running", agent=WORKING))
    await node.until("RUNNING", "running")
    await node.put(order("waiting", agent=WORKING))
    await node.until("READY", "waiting")
    return await asked(process, "running")


async def test_what_a_killed_gateway_had_captured_is_salvaged(process: NodeProcess) -> None:
    process.settings = ("pools.run=1",)
    await process.start()
    async with client(process.url) as node:
        journal = await begin(node, process)
    assert list((process.directory / "tmp").iterdir()), "there are sandboxes"
    await process.kill()
    with journal.open("ab") as torn:
        torn.write(b'{"call_id": "torn while it was wri')
    await process.start()
    async with client(process.url) as node:
        for session_id, calls in (("running", 1), ("waiting", 0)):
            episode = await node.episode(session_id)
            session, fidelity = episode.session, episode.trajectory.fidelity
            assert session.failure is not None
            assert (session.status, session.failure.kind, episode.reward) == (Status.INTERRUPTED, "interrupted", None)
            assert (fidelity.calls, len(episode.trajectory.traces), fidelity.exact) == (calls, calls, True)
            assert (await node.put(order(session_id)))[0] == 200, "it is known, and not run again"
        assert (await node.put(order("running", attempt=1)))[0] == 201
        assert (await node.episode("running", attempt=1)).session.status is Status.COMPLETED
    assert list((process.directory / "tmp").iterdir()) == []
    assert "salvaged 2 sessions" in process.log.read_text()


async def test_a_gateway_that_starts_again_leaves_another_nodes_attempt_alone(tmp_path: Path) -> None:
    """Guards against a node that removed the sandbox of a session's next attempt, which ran on another node of the same
    machine: sandboxes were told apart by the session's id alone."""
    need_bubblewrap()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    shared, own = (
        RuntimeSpec.model_validate({"name": "bubblewrap", "scratch": str(scratch)}),
        (f"runtime.scratch={scratch}",),
    )
    died, other = (NodeProcess(tmp_path / name, free_port(), own) for name in ("died", "other"))
    try:
        await asyncio.gather(died.start(), other.start())
        async with client(died.url) as node:
            await node.put(order(agent=WORKING, runtime=shared))
            await node.until("RUNNING")
        (orphan,) = scratch.iterdir()
        await died.kill()
        async with client(other.url) as node:
            await node.put(order(attempt=1, agent=WORKING, runtime=shared))
            await node.until("RUNNING", attempt=1)
            await died.start()
            (left,) = scratch.iterdir()
            assert left != orphan
            assert await node.status("s", 1) == "RUNNING"
    finally:
        await died.kill()
        await other.kill()


async def test_a_second_process_on_the_same_state_is_refused(process: NodeProcess, tmp_path: Path) -> None:
    """Guards against two processes that salvage each other's running sessions."""
    await process.start()
    second = NodeProcess(process.directory, free_port())
    refused = await second.spawn()
    assert await asyncio.wait_for(refused.wait(), 60) == 75
    assert f"state={tmp_path}/node/state: another process serves it" in process.log.read_text()
    async with client(process.url) as node:
        assert (await node.ask("GET", "/v1/sessions"))[1] == []


@pytest.mark.parametrize(("grace", "ends"), [(20, Status.COMPLETED), (0, Status.INTERRUPTED)])
async def test_a_stopped_gateway_lets_running_sessions_finish_for_a_while(
    process: NodeProcess, grace: int, ends: Status
) -> None:
    process.settings = ("pools.run=1", f"grace_seconds={grace}")
    await process.start()
    async with client(process.url) as node:
        await node.put(order("running", agent=asking("ask(); import time; time.sleep(2)")))
        await asked(process, "running")
        await node.put(order("waiting"))
        assert process.process is not None
        running = process.process
    await process.terminate()
    assert running.returncode == 0, process.log.read_text()
    assert list((process.directory / "tmp").iterdir()) == []
    await process.start()
    async with client(process.url) as node:
        first, second = await node.episode("running"), await node.episode("waiting")
    assert (first.session.status, first.trajectory.fidelity.calls) == (ends, 1)
    assert (second.session.status, second.trajectory.fidelity.calls) == (Status.INTERRUPTED, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["listen=0.0.0.0:0"], "listen=0.0.0.0:0: other machines could reach it, and there is no key; set POLAR_GYM_"),
        (["listen=here"], "listen='here': expected host:port, e.g. 127.0.0.1:8701"),
        (["server=ftp://x"], "server='ftp://x': expected a URL"),
        (["server=http://x", "listen=0.0.0.0:1"], "url: is required with listen=0.0.0.0:1"),
        (
            ["server=http://x:8700"],
            "url: is required with server=http://x:8700, which cannot reach listen=127.0.0.1:8701",
        ),
        (["grace_seconds=soon"], "grace_seconds='soon': Input should be a valid number"),
        (["speed=3"], "speed=3: unknown setting; known here: listen, "),
        (["state=/proc/nowhere"], "state=/proc/nowhere: No such file or directory; name a directory that can be"),
        (["gateway"], "'gateway': expected key=value"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NODE_KEY, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "runtime=bubblewrap", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_a_key_comes_from_the_environment_or_a_file_and_leaves_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against keys that every process inherits that a gateway starts."""
    monkeypatch.setenv(NODE_KEY, KEY)
    assert take_key(NODE_KEY) == KEY
    assert NODE_KEY not in os.environ
    assert take_key(NODE_KEY) is None
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv(f"{NODE_KEY}_FILE", str(tmp_path / "key"))
    assert take_key(NODE_KEY) == KEY
    monkeypatch.setenv(f"{NODE_KEY}_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"POLAR_GYM_NODE_KEY_FILE=.*none: cannot be read"):
        take_key(NODE_KEY)
    for weak in ("short", "with blanks in the middle", "ümlauts-are-not-ascii"):
        monkeypatch.setenv(NODE_KEY, weak)
        with pytest.raises(ConfigError, match="at least 16 printable ASCII") as caught:
            take_key(NODE_KEY)
        assert weak not in str(caught.value)


@pytest.mark.parametrize(
    "ending",
    [
        "ask(); os.execvp('sleep', {})",
        f"ask(tools=[{BASH}]); __import__('subprocess').run({{}}); sys.exit(0)",
    ],
    ids=["killed", "ends in order"],
)
async def test_a_stop_that_reaches_every_process_interrupts_sessions(process: NodeProcess, ending: str) -> None:
    """Guards against sessions that count as ended because Slurm or systemd signalled their harness as well."""
    process.settings = ("engine.scripts=[{commands: ['true'], final_message: Done.}]",)
    await process.start()
    marked = Marked()
    async with client(process.url) as speaker:
        await speaker.put(order(agent=asking(ending.replace("{}", str(marked.command.split())))))
        await marked.until(True)
        gateway = process.process
        assert gateway is not None
        gateway.send_signal(signal.SIGTERM)
        for pid in marked.pids():
            os.kill(pid, signal.SIGTERM)
        await asyncio.wait_for(gateway.wait(), 120)
        await process.start()
        episode = await speaker.episode()
    assert (episode.session.status, episode.evaluation) == (Status.INTERRUPTED, None)
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "interrupted"
    assert episode.trajectory.fidelity.calls == 1
