"""The runtime that isolates nothing: it must be accepted, ends its processes, clears its paths, and says low trust."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.runtimes import HOME, Command, Mount, SandboxError, SandboxRequest
from polar_gym.runtimes.unconfined import LOCK, SUBREAPER, UnconfinedSandbox
from polar_gym.schema import RuntimeSpec
from tests.lifecycle.runtime_kinds import Marked, broken_laws, make, started
from tests.support.requirements import need_node

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="runtime=unconfined makes paths of the machine: root only")
LEFT = """
import os, sys, time
sleep = sys.argv[1].split()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execvp(sleep[0], sleep)
    os._exit(0)
time.sleep(float(sys.argv[2]))
"""


def test_it_must_be_accepted() -> None:
    with pytest.raises(ConfigError, match=r"runtime.accept_no_isolation=False.*isolates nothing.*=true to accept"):
        load_config("demo", ["runtime=unconfined"])


@ROOT
@pytest.mark.parametrize("limit", [30.0, 0.5], ids=["ends", "is killed"])
async def test_no_process_outlives_its_command(tmp_path: Path, limit: float) -> None:
    """Guards against daemons of a harness that go on after its end."""
    marked, seconds = Marked(), "0" if limit > 1 else "1000"
    async with started(make("unconfined", accept_no_isolation=True, scratch=tmp_path)) as sandbox:
        argv = ["python3", "-c", LEFT, marked.command, seconds]
        result = await sandbox.exec(Command(argv=argv, timeout_seconds=limit))
        assert marked.pids() == []
        assert (await sandbox.exec(Command(argv=["ls"], workdir="/nowhere"))).exit_code == 126
        assert (await sandbox.exec(Command(argv=["no-such-program"]))).exit_code == 127
    assert result.timed_out == (limit < 1)


def test_processes_end_with_their_gateway() -> None:
    """Guards against harnesses that live on where their gateway was killed."""
    marked = Marked()
    argv = [sys.executable, str(SUBREAPER), "/", "1000", "sh", "-c", f"echo up; {marked.command}"]
    child = f"import subprocess; subprocess.run({argv!r})"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == b"up\n"
        gateway.kill()
        gateway.stdout.read()  # until the last process that has it open has ended
    assert marked.pids() == []


@ROOT
async def test_paths_lead_to_one_sandbox_at_a_time(tmp_path: Path) -> None:
    (file := tmp_path / "tool").write_text("7")
    runtime = make("unconfined", accept_no_isolation=True, scratch=tmp_path)
    mounts = [Mount(file, "/opt/polar-gym/test/tool")]
    async with started(runtime, mounts=mounts) as first:
        assert isinstance(first, UnconfinedSandbox)
        second = asyncio.create_task(
            runtime.start(SandboxRequest(session_id="b", spec=RuntimeSpec(name="any"), workspace=None))
        )
        told = await first.exec(
            Command(argv=["sh", "-c", f"echo a > {HOME}/a; cat /opt/polar-gym/test/tool; echo; pwd -P"])
        )
        assert told.stdout.decode().split() == ["7", str(first.scratch / "disk" / "workspace")]
        assert not second.done(), "the paths are the first one's"
    other = await second
    assert (await other.exec(Command(argv=["ls", HOME]))).stdout == b""
    await other.stop()
    assert not os.path.lexists(HOME)
    assert not os.path.lexists("/opt/polar-gym/test")


@ROOT
async def test_a_path_of_the_machine_stays(tmp_path: Path) -> None:
    runtime = make("unconfined", accept_no_isolation=True, scratch=tmp_path)
    (mine := tmp_path / "mine").mkdir()
    with pytest.raises(SandboxError, match=f"needs the path {mine}, where this machine has something"):
        async with started(runtime, mounts=[Mount(tmp_path, str(mine))]):
            pass
    assert mine.is_dir()
    assert not os.path.lexists(HOME), "what was made before is removed"


@ROOT
async def test_paths_of_a_killed_gateway_are_taken_over(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from polar_gym.schema import RuntimeSpec
from tests.lifecycle.runtime_kinds import Marked, broken_laws, make, started
async def main():
    async with started(make("unconfined", accept_no_isolation=True, scratch=Path({str(tmp_path)!r}))):
        print("up", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert gateway.stdout is not None
    assert await gateway.stdout.readline() == b"up\n"
    gateway.kill()
    await gateway.wait()
    assert Path(HOME).is_symlink()
    runtime = make("unconfined", accept_no_isolation=True, scratch=tmp_path)
    async with started(runtime) as sandbox:
        assert (await sandbox.exec(Command(argv=["touch", f"{HOME}/a"]))).exit_code == 0
    assert LOCK.exists()


@ROOT
async def test_a_real_session_has_a_reward_of_low_trust(tmp_path: Path) -> None:
    need_node()
    settings = [
        "runtime=unconfined",
        "runtime.accept_no_isolation=true",
        f"rollout.output={tmp_path / 'episodes.jsonl'}",
    ]
    config = load_config("demo", settings)
    tasks = load_tasks(config)[:3]
    async with make_node(config, tasks) as node:
        episodes = await asyncio.gather(*(node.rollout(make_request(config, task)) for task in tasks))
    for episode in episodes:
        assert episode.session.failure is None
        assert episode.evaluation is not None
        assert (episode.evaluation.reward, episode.evaluation.trust) == (1.0, "low")


@ROOT
async def test_the_laws_of_isolation_fail() -> None:
    """Guards against laws of `runtimes.laws` that hold whatever a runtime does."""
    failed = await broken_laws("runtime=unconfined", "runtime.accept_no_isolation=true")
    isolation = {
        "mounts are read-only",
        "reaches nothing else",
        "sandboxes are apart",
        "no rights",
        "memory is limited",
        "processes are limited",
    }
    assert failed.keys() - {"graders have no gateway", "stop leaves nothing"} == isolation, failed
    assert not Path(HOME).is_symlink(), "a killed gateway left it, and the next one did not remove it"
