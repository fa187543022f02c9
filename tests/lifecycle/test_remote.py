"""Sandboxes of a provider that speaks NeMo Gym's protocol: what is refused, what is sent, and a whole session.

The laws that hold for every runtime are in `test_runtimes`, `test_network` and `test_runtime_diff`.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.runtimes import HOME, Command, Mount, SandboxError, scratch_directory
from polar_gym.runtimes.conformance import examine
from polar_gym.runtimes.relay.websocket import TOKEN
from polar_gym.runtimes.remote.layers import LARGE, put
from polar_gym.runtimes.remote.sandbox import HANDLE, RemoteSandbox
from polar_gym.runtimes.remote.streams import WEB_PORT, WebStream
from polar_gym.schema import RuntimeSpec, Workspace
from tests.lifecycle.runtime_kinds import Marked, ask_gateway, gateway, make, sh, started
from tests.support import sandbox_provider
from tests.support.requirements import need_bubblewrap, need_node
from tests.support.sandbox_provider import Boxes, Routed, Streamless
from tests.support.ssh_host import UID, WORKSPACE, Host, ssh_host

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="the provider of tests needs root")


@pytest.fixture(autouse=True)
def providers(tmp_path: Path) -> Iterator[None]:
    need_bubblewrap()
    Streamless.made.clear()
    with sandbox_provider.installed(tmp_path / "installed"):
        yield


def made() -> Boxes:
    """Return the provider that the runtime made last."""
    provider = Streamless.made[-1]
    assert isinstance(provider, Boxes)
    return provider


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], r"runtime\.provider: is required"),
        (
            ["runtime.provider=nowhere"],
            r"runtime\.provider='nowhere': .*boxes, routed, ssh, streamless\), and NeMo Gym's own need ",
        ),
        (
            ["runtime.provider=opensandbox"],
            rf"Python >= 3\.13\.14; this is Python {re.escape(platform.python_version())}",
        ),
        (["runtime.provider=streamless"], r"runtime\.provider='streamless': .*gives no stream of bytes.*docker exec"),
        (["runtime.provider=boxes", "runtime.confg={}"], r"runtime\.confg.*unknown key"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config("demo", ["runtime=remote", *settings])


def test_a_provider_that_isolates_nothing_must_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_gym.runtimes.remote.find", lambda _: Streamless)
    with pytest.raises(ConfigError, match=r"accept_no_isolation=False: .*provider=local isolates nothing.*=true to"):
        load_config("demo", ["runtime=remote", "runtime.provider=local"])


def test_a_provider_that_cannot_be_made_is_named_with_its_config() -> None:
    with pytest.raises(ConfigError, match=r'provider=boxes: cannot be made with runtime\.config=\{"nothing": 1\}: '):
        make("remote", provider="boxes", config={"nothing": 1})


async def test_a_sandbox_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    runtime = make("remote", provider="boxes", config={"refuse": "no quota"}, scratch=tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(SandboxError, match="provider=boxes made no sandbox: RuntimeError: no quota"):
        async with started(runtime):
            pass
    with pytest.raises(SandboxError, match=r"network=full.*opens no network; set runtime\.network=gateway"):
        async with started(runtime, spec=RuntimeSpec(name="remote", network="full")):
            pass
    assert not any((tmp_path / "scratch").iterdir())


@ROOT
async def test_the_provider_is_told_what_is_wanted() -> None:
    runtime = make("remote", provider="boxes", cpus=2, memory_mb=4096, ttl_seconds=60, options={"region": "here"})
    async with started(runtime, spec=RuntimeSpec(name="remote", image="some/image:1"), node="n1"):
        (spec,) = made().specs
    assert (spec.image, spec.ttl_s, spec.provider_options) == ("some/image:1", 60, {"region": "here"})
    assert (spec.resources.cpu, spec.resources.memory_mib, spec.resources.disk_gib) == (2, 4096, 16)
    assert spec.metadata.keys() == {"polar-gym.session", "polar-gym.node", "polar-gym.sandbox"}
    assert (spec.metadata["polar-gym.session"], spec.metadata["polar-gym.node"]) == ("test-session", "n1")
    assert made().alive == {}


@ROOT
async def test_a_sandbox_is_sent_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_text("7")
    (tmp_path / "tool" / "link").symlink_to("file")
    mounts = [
        Mount(tmp_path / "tool", "/opt/polar-gym/tool"),
        Mount(tmp_path / "tool" / "file", "/opt/polar-gym/bin/x"),
    ]
    async with started(make("remote", provider="boxes"), mounts=mounts) as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        seen = await sh(sandbox, "cat /opt/polar-gym/tool/link /opt/polar-gym/bin/x; touch /opt/polar-gym/tool/y")
        assert seen.stdout == b"77"
        assert b"Permission denied" in seen.stderr
        before = len(made().sent)
        assert before == 1 + len(mounts), "the relay, and a layer for each mount"
        await put(sandbox._shell, sandbox._layers, sandbox._directory)
        assert len(made().sent) == before, "it has them"


@ROOT
async def test_the_second_sandbox_does_not_pay_for_a_layer(tmp_path: Path) -> None:
    """Guards against toolchains that are sent to every sandbox."""
    (tmp_path / "storage").mkdir()
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_bytes(os.urandom(2 * LARGE))
    (tmp_path / "small").write_text("7")
    mounts = [Mount(tmp_path / "tool", "/opt/polar-gym/tool"), Mount(tmp_path / "small", "/opt/polar-gym/bin/small")]
    config = {"storage": str(tmp_path / "storage")}
    for gateway_number in range(2):
        runtime = make("remote", provider="boxes", config=config)
        for number in range(2):
            async with started(runtime, mounts=mounts) as sandbox:
                tried = (
                    "cmp /opt/polar-gym/tool/file - && cat /opt/polar-gym/bin/small; echo x >> /opt/polar-gym/tool/file"
                )
                seen = await sh(sandbox, tried, stdin=(tmp_path / "tool" / "file").read_bytes())
                assert seen.stdout == b"7"
                assert b"Permission denied" in seen.stderr or b"Read-only" in seen.stderr
            assert sum(size > LARGE for _, size in made().sent) == (gateway_number == 0), number
        assert made().alive == {}
        assert all(spec.metadata["placed"] == "here" for spec in made().specs)
    (volume,) = (tmp_path / "storage").iterdir()
    (volume / ".complete").unlink()  # as if a gateway had died while it filled the volume
    async with started(make("remote", provider="boxes", config=config), mounts=mounts) as sandbox:
        seen = await sh(sandbox, "wc -c < /opt/polar-gym/tool/file")
        assert seen.stdout == f"{2 * LARGE}\n".encode(), seen
    assert (volume / ".complete").exists()


@ROOT
async def test_a_route_without_the_sessions_token_ends_nowhere() -> None:
    """Guards against an agent, or a stranger who learns of a public route, in the place of the gateway."""
    async with started(make("remote", provider="routed"), serve=gateway("hello")) as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        assert await ask_gateway(sandbox) == "hello"
        asked = (
            "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8079, timeout=20);"
            "c.request('GET', '/', headers={'Sec-WebSocket-Key': 'AAAA', 'polar-gym-token': 'x'});"
            "print(c.getresponse().status)"
        )
        inside = await sandbox.exec(Command(argv=["python3", "-c", asked]))
        assert inside.stdout == b"403\n", inside.stderr
        assert b"denied" in (await sh(sandbox, 'cat "$1"/token', sandbox._directory)).stderr
        provider = Streamless.made[-1]
        assert isinstance(provider, Routed)
        endpoint = await provider.endpoint(next(iter(provider.alive.values())), WEB_PORT)
        with pytest.raises(OSError, match="403"):
            await WebStream.connect(endpoint.endpoint, {**endpoint.headers, TOKEN: "another"})
        with pytest.raises(OSError, match="401"):
            await WebStream.connect(endpoint.endpoint, {})


@ROOT
async def test_the_agent_cannot_touch_the_relay() -> None:
    """Guards against tests of a task that change what the gateway is told about them."""
    async with started(make("remote", provider="boxes")) as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        relay = "pid=$(pgrep -f '[r]elay.pyz serve')"
        script = f"{relay} && kill $pid; cat /proc/$pid/environ; ls $1; grep NoNew /proc/self/status"
        tried = await sh(sandbox, script, sandbox._directory)
        assert tried.stderr.count(b"not permitted") == 1
        assert tried.stderr.count(b"Permission denied") == 2
        assert tried.stdout == b"NoNewPrivs:\t1\n"


async def end(handle: Any) -> None:
    await made().close(handle)


async def wait_for_its_end(handle: Any) -> None:
    await handle.raw[0].wait()


async def kill_its_relay(handle: Any) -> None:
    await made().exec(handle, "pkill -9 -f '[r]elay.pyz serve'")


@ROOT
@pytest.mark.parametrize(
    ("dies", "ttl", "reason"),
    [
        (end, 600, "it was evicted, and is stopped now"),
        (wait_for_its_end, 5, r"it expired \(runtime\.ttl_seconds\)"),
        (kill_its_relay, 600, "its relay was killed"),
    ],
    ids=["evicted", "expired", "relay killed"],
)
async def test_a_sandbox_that_dies_says_why_at_once(dies: Callable[[Any], Any], ttl: float, reason: str) -> None:
    """It once took a minute, and the error was that of the last attempt to reach the sandbox."""
    async with started(make("remote", provider="boxes", ttl_seconds=ttl), serve=gateway("hello")) as sandbox:
        marked = Marked()
        running = asyncio.create_task(sandbox.exec(Command(argv=marked.command.split())))
        await marked.until(alive=True)
        (handle,) = made().alive.values()
        await dies(handle)
        with pytest.raises(SandboxError, match=f"cannot be reached any more: {reason}"):
            await asyncio.wait_for(running, 30)


@ROOT
async def test_a_creation_whose_answer_is_lost_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sandboxes that are paid for, and that nobody knows: those of other sessions stay."""

    async def close_all(self: Boxes, metadata: dict[str, str]) -> int:
        pairs = zip(self.specs, list(self.alive.values()), strict=True)
        found = [handle for spec, handle in pairs if metadata.items() <= spec.metadata.items()]
        for handle in found:
            await self.close(handle)
        return len(found)

    monkeypatch.setattr(Boxes, "close_all", close_all, raising=False)
    runtime, create = make("remote", provider="boxes"), Boxes.create

    async def lose_the_answer(self: Boxes, spec: Any) -> Any:
        await create(self, spec)
        raise ConnectionError("no answer")

    async with started(runtime) as bystander:
        with monkeypatch.context() as patched:
            patched.setattr(Boxes, "create", lose_the_answer)
            with pytest.raises(SandboxError, match="made no sandbox: ConnectionError: no answer"):
                async with started(runtime):
                    pass
        assert (await sh(bystander, "echo here")).stdout == b"here\n"
        assert len(made().alive) == 1
        del made().specs[1:]
        assert await runtime.reap(["test-session"]) == 1
        assert made().alive == {}


@ROOT
async def test_a_gateway_that_starts_again_ends_what_expired_or_cannot_say_that_it_did(tmp_path: Path) -> None:
    """Guards against directories that stay for ever, because the sandbox that they describe is gone."""
    runtime = make("remote", provider="boxes", scratch=tmp_path)
    for until, said in ((time.time() - 1, None), (time.time() + 600, "sandboxes of s could not be ended: KeyError")):
        scratch = scratch_directory.make("s", tmp_path)
        (scratch / HANDLE).write_text(json.dumps({"handle": {}, "until": until}))
        if said is None:
            assert await runtime.reap(["s"]) == 0
            assert not scratch.exists()
        else:
            with pytest.raises(SandboxError, match=said):
                await runtime.reap(["s"])
            assert scratch.exists()


@ROOT
async def test_a_cancelled_start_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sandboxes that are paid for, and that nobody knows."""
    runtime = make("remote", provider="boxes")
    create, asked = made().create, asyncio.Event()

    async def slowly(spec: Any) -> Any:
        asked.set()
        return await create(spec)

    monkeypatch.setattr(made(), "create", slowly)
    starting = asyncio.create_task(anext(started(runtime).gen))
    await asked.wait()
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    assert made().specs
    assert made().alive == {}


@pytest.fixture
def host() -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("the machine of tests needs root")
    with ssh_host() as host:
        yield host


async def test_a_killed_gateways_successor_frees_the_machine_at_once(host: Host) -> None:
    """It once found nothing to end, and the machine's paths were taken for ten minutes."""
    options = {"name": "remote", "provider": "ssh", "config": host.config, "workspace": {"path": WORKSPACE}}
    law = "nor does a killed gateway"
    for _ in range(2):
        assert await examine(RuntimeSpec.model_validate(options), [law]) == {law: ""}


async def test_a_user_of_another_machine(host: Host, tmp_path: Path) -> None:
    """What a sandbox leaves on a machine that stays: no file and no process, nor those of a killed gateway."""
    (tmp_path / "tool").write_text("7")
    spec = RuntimeSpec(name="remote", workspace=Workspace(path=WORKSPACE), environment={"FROM_TASK": "yes"})
    runtime, marked = make("remote", provider="ssh", config=host.config), Marked()
    mounts = [Mount(tmp_path / "tool", "/opt/polar-gym/bin/tool")]
    for _ in range(2):
        async with started(runtime, spec=spec, serve=gateway("hello"), mounts=mounts) as sandbox:
            look = "id -u; pwd; echo $FROM_TASK; cat /opt/polar-gym/bin/tool -; tail -n +3 /proc/net/dev | cut -d: -f1"
            script = f"{look}; mkdir -p ~/left/deep; chmod 0 ~/left"
            told = await sh(sandbox, script, stdin=b"x\n")
            assert told.stdout.decode().split() == [str(UID), WORKSPACE, "yes", "7x", "lo"]
            assert await ask_gateway(sandbox) == "hello"
            assert (await sh(sandbox, f"setsid {marked.command} & wait", timeout_seconds=0.5)).timed_out
            assert not marked.alive()
            second = asyncio.create_task(anext(started(runtime, spec=spec).gen))
            await asyncio.wait({second}, timeout=0.1)
            assert not second.done(), "the machine's paths are the first one's"
            second.cancel()
        assert host.run("find", HOME, WORKSPACE, "/opt/polar-gym", "/tmp", "-mindepth", "1") == ""
        host.run("sh", "-c", f"while pgrep -u {UID} python3; do sleep 0.05; done")  # streams end a moment later
    host.run(
        "sh", "-c", f"echo 1 > {HOME}/left; setpriv --reuid {UID} touch -d '1 hour ago' /tmp/polar-gym-taken-{UID}"
    )
    async with started(runtime, spec=spec) as sandbox:
        assert (await sh(sandbox, "ls ~")).stdout == b""
    host.run("touch", f"{WORKSPACE}/operators")
    with pytest.raises(
        SandboxError, match=rf"\({WORKSPACE} is not empty\): these paths must be empty, and this user's"
    ):
        async with started(runtime, spec=spec):
            pass
    assert host.run("ls", WORKSPACE) == "operators\n"


async def test_a_machine_that_does_not_answer_is_named(host: Host) -> None:
    config = host.config | {"options": ["-p", "1", *host.options]}
    with pytest.raises(
        SandboxError, match=r"provider=ssh made no sandbox: RuntimeError: .*ssh.* exited with 255: .*refus"
    ):
        async with started(make("remote", provider="ssh", config=config)):
            pass


async def test_a_real_session_on_another_machine(host: Host, tmp_path: Path) -> None:
    need_node()
    workspace = {"path": WORKSPACE}
    settings = {"runtime": {"name": "remote", "provider": "ssh", "config": host.config, "workspace": workspace}}
    config = load_config("demo", ["harness=pi", f"rollout.output={tmp_path / 'episodes.jsonl'}"], settings)
    tasks = load_tasks(config)[:1]
    async with make_node(config, tasks) as node:
        episode = await node.rollout(make_request(config, tasks[0]))
    assert episode.session.failure is None
    assert episode.evaluation is not None
    assert (episode.evaluation.reward, episode.evaluation.trust) == (1.0, "low")


@ROOT
@pytest.mark.parametrize("provider", ["boxes", "routed"])
@pytest.mark.parametrize("cut_after", [10**9, 100_000], ids=["whole", "cut"])
async def test_a_real_session_has_its_reward(tmp_path: Path, cut_after: int, provider: str) -> None:
    """A harness's calls go on where the connection to its sandbox was lost in the midst of them."""
    need_node()
    settings = [
        "runtime=remote",
        f"runtime.provider={provider}",
        f"runtime.config={{cut_after:{cut_after}}}",
        "harness=pi",
        f"rollout.output={tmp_path / 'episodes.jsonl'}",
    ]
    config = load_config("demo", settings)
    tasks = load_tasks(config)[:2]
    async with make_node(config, tasks) as node:
        for task in tasks:
            episode = await node.rollout(make_request(config, task))
            assert episode.session.failure is None
            assert episode.evaluation is not None
            assert (episode.evaluation.reward, episode.evaluation.trust) == (1.0, "high")
            assert episode.trajectory.traces
        used = Streamless.made[-1]
        lost = used.lost if isinstance(used, Routed) else sum(each.cut_after < 0 for each in made().sessions)
        assert lost == 0 if cut_after > 10**6 else lost >= 2
    assert used.alive == {}
