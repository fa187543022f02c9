"""What a sandbox may use of the machine, as a whole; and what its container is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from polar_gym.runtimes import Command, DiskFullError, Runtime, Sandbox, SandboxError
from polar_gym.runtimes.bubblewrap import BubblewrapSandbox
from polar_gym.runtimes.docker.daemon import Starts
from polar_gym.runtimes.docker.sandbox import NODE_LABEL, SECURITY, SESSION_LABEL
from polar_gym.runtimes.kernel import disk
from polar_gym.schema import RuntimeSpec
from tests.lifecycle.images import BUSYBOX_FILES, imported
from tests.lifecycle.runtime_kinds import MakeRuntime, make, make_runtime, of_own, runtime, sandbox, sh, started
from tests.support import apptainer
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_bubblewrap

__all__ = ["docker_host", "make_runtime", "runtime", "sandbox"]

ALLOCATE = """
import json, subprocess, sys
program = "import sys; held = b'x' * (100 << 20); print('up', flush=True); sys.stdin.read()"
children = [subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) for _ in range(4)]
for child in children:
    child.stdout.readline()
for child in children:
    child.stdin.close()
print(json.dumps([child.wait() for child in children]))
"""
"""Four processes hold 100 MiB each at the same time; prints how each ended."""

FORK = """
import json, subprocess
children = []
try:
    for _ in range(200):
        children.append(subprocess.Popen(["sleep", "60"]))
except OSError as error:
    print(json.dumps([len(children), error.errno]))
"""

FILL = """
import os, signal
print("up", flush=True)
while True:
    try:
        if os.fork() == 0:
            signal.pause()
    except OSError:
        pass
"""
"""Takes every process that the sandbox may have, also one that becomes free."""

BURN = """
import time
end = time.monotonic() + 1
while time.monotonic() < end: pass
print(time.process_time())
"""


async def limited(make_runtime: MakeRuntime, **options: object) -> Runtime:
    runtime = make_runtime(**options)
    caveats = await asyncio.to_thread(runtime.caveats)
    lacking = [caveat for caveat in caveats if "control group" in caveat]
    need(not lacking, f"control groups ({lacking})", "run the tests as root outside of a container")
    return runtime


async def python(sandbox: Sandbox, program: str) -> str:
    result = await sandbox.exec(Command(argv=["python3", "-c", program]))
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode()


@of_own
async def test_memory_is_limited_for_all_processes_together(make_runtime: MakeRuntime):
    runtime = await limited(make_runtime, memory_mb=256)
    async with started(runtime) as sandbox:
        codes = json.loads(await python(sandbox, ALLOCATE))
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"
    assert 0 in codes, "each of them alone is within the limit"
    assert -9 in codes, "all of them together are not"
    await runtime.close()


@of_own
async def test_processes_are_limited_and_the_sandbox_stays_usable(make_runtime: MakeRuntime):
    runtime = await limited(make_runtime, pids=60)
    async with started(runtime) as sandbox:
        count, _ = json.loads(await python(sandbox, FORK))
        assert 30 < count < 60
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"
    await runtime.close()


@of_own
async def test_an_agent_that_leaves_no_process_is_killed_at_its_time_limit(make_runtime: MakeRuntime):
    """It could not be killed, as that took a process of its own, and lost its sandbox: it was masked, not graded."""
    runtime = await limited(make_runtime, pids=60)
    async with started(runtime) as sandbox:
        filled = await sandbox.exec(Command(argv=["python3", "-c", FILL], timeout_seconds=2))
        assert (filled.stdout, filled.timed_out) == (b"up\n", True)
        assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"
    await runtime.close()


@of_own
async def test_processor_time_is_limited(make_runtime: MakeRuntime):
    runtime = await limited(make_runtime, cpus=0.25)
    async with started(runtime) as sandbox:
        assert float(await python(sandbox, BURN)) < 0.6
    await runtime.close()


@of_own
async def test_a_file_is_limited(make_runtime: MakeRuntime, request: pytest.FixtureRequest):
    """On a disk whose quotas Docker cannot use, its limit falls back to this."""
    name = "disk_mb" if "docker" in request.node.name else "file_mb"
    runtime = make_runtime(**{name: 2})
    async with started(runtime) as sandbox:
        result = await sh(sandbox, "head -c 4000000 /dev/zero > ~/big; wc -c < ~/big")
    assert int(result.stdout) <= 2 << 20
    await runtime.close()


WRITE = """
import os
held = []
for name in ("/var/tmp/a", "/tmp/b", os.path.expanduser("~/c"), "d"):
    try:
        held.append(file := open(name, "wb", buffering=0))
        os.unlink(name)
        for _ in range(100): file.write(bytes(1 << 20))
    except OSError as error:
        print(name, error.errno)
"""
"""Writes four files of 100 MiB each that have no name; prints which could not be written, and why."""


@pytest.mark.parametrize("kind", ["bubblewrap", "apptainer"])
async def test_a_disk_is_limited_for_all_files_together(kind: str, tmp_path: Path):
    more = {"program": apptainer.program()} if kind == "apptainer" else {}
    runtime = make(kind, scratch=tmp_path, disk_mb=150, **more)
    lacking = [caveat for caveat in await asyncio.to_thread(runtime.caveats) if "file system of its own" in caveat]
    need(not lacking, f"loop devices ({lacking})", "run the tests as root outside of a container")
    async with started(runtime) as sandbox:
        before = (await sh(sandbox, "df -m . | tail -n 1")).stdout.split()
        said = await python(sandbox, WRITE)
        assert said.endswith("d 28\n"), said
        assert int(before[1]) <= 150
        assert b"No space left" in (await sh(sandbox, "cat /dev/zero > full; echo no > e")).stderr
        assert (await sh(sandbox, "echo usable > e; cat e")).stdout == b"usable\n", "there is a reserve"
    assert list(tmp_path.iterdir()) == []
    await runtime.close()


async def test_small_files_do_not_use_up_the_inodes_of_a_disk(tmp_path: Path):
    """Guards against a disk with much space on which no file could be made, not even for the diff."""
    runtime = make("bubblewrap", scratch=tmp_path, disk_mb=600)
    lacking = [caveat for caveat in await asyncio.to_thread(runtime.caveats) if "file system of its own" in caveat]
    need(not lacking, f"loop devices ({lacking})", "run the tests as root outside of a container")
    async with started(runtime) as sandbox:
        program = "for number in range(50_000): open(str(number), 'w').close()"
        assert (await sandbox.exec(Command(argv=["python3", "-c", program]))).stderr == b""
    await runtime.close()


async def test_a_disk_that_is_smaller_than_promised_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Guards against sandboxes that have a part of `runtime.disk_mb`, in silence."""
    need_bubblewrap()
    runtime = make("bubblewrap", scratch=tmp_path, disk_mb=1 << 30)
    with caplog.at_level(logging.WARNING, logger="polar_gym"):
        for _ in range(2):
            async with started(runtime):
                pass
    (said,) = [each.getMessage() for each in caplog.records if "runtime.disk_mb=1073741824" in each.getMessage()]
    assert re.match(r"a sandbox may write \d+ MiB, not runtime", said)
    await runtime.close()


async def test_a_full_disk_of_the_daemon_is_not_the_agents_doing(docker_host: str, monkeypatch: pytest.MonkeyPatch):
    """Guards against a reward of 0 for tests that could not write; who filled the disk is scored all the same."""
    runtime = make("docker", host=docker_host)
    async with started(runtime) as sandbox:
        monkeypatch.setattr(disk, "LEAST_FREE", 1 << 60)
        monkeypatch.setattr(disk, "SHARE", disk.free(Path("/")) // 2_000_000)
        with pytest.raises(DiskFullError, match="and this sandbox did not fill it"):
            await sh(sandbox, "true")
        await sh(sandbox, "head -c 1500000 /dev/zero > ~/big")
        assert (await sh(sandbox, "wc -c < ~/big")).stdout == b"1500000\n"
    await runtime.close()


async def test_docker_says_once_that_it_cannot_limit_the_disk(docker_host: str, caplog: pytest.LogCaptureFixture):
    runtime = make("docker", host=docker_host)
    with caplog.at_level(logging.WARNING, logger="polar_gym"):
        for _ in range(2):
            async with started(runtime):
                pass
    said = [record for record in caplog.records if "runtime.disk_mb" in record.message]
    assert len(said) == any("each file alone" in caveat for caveat in await asyncio.to_thread(runtime.caveats))
    await runtime.close()


async def test_container_has_labels_and_no_rights(docker_host: str):
    runtime = make("docker", host=docker_host, memory_mb=300, pids=99, cpus=1.5)
    async with started(runtime, session_id="labelled", node="node-7"):
        with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
            (container,) = client.containers.list(filters={"label": f"{SESSION_LABEL}=labelled"})
    assert container.labels[NODE_LABEL] == "node-7"
    host = container.attrs["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == list(SECURITY)
    assert not host["Privileged"]
    assert host["NetworkMode"] == "none"
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["NanoCpus"]) == (
        *(300 << 20, 300 << 20),
        *(99, 1_500_000_000),
    )
    await runtime.close()


async def test_the_health_check_of_an_image_does_not_run(docker_host: str):
    """It would run as root, in grading also on the agent's files."""
    runtime = make("docker", host=docker_host)
    checked = ["ENV PATH=/bin", "HEALTHCHECK --interval=1s CMD true"]
    with imported(docker_host, BUSYBOX_FILES, changes=checked) as tag:
        spec = RuntimeSpec(name="docker", image=tag)
        async with started(runtime, session_id="healthy", spec=spec):
            with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
                assert client.images.get(tag).attrs["Config"]["Healthcheck"]["Test"] == ["CMD-SHELL", "true"]
                (container,) = client.containers.list(filters={"label": f"{SESSION_LABEL}=healthy"})
                assert "Health" not in container.attrs["State"]
    await runtime.close()


@contextlib.asynccontextmanager
async def docker_and_its_first_process(host: str) -> AsyncIterator[tuple[Sandbox, int]]:
    need(os.geteuid() == 0, "root", "run the tests as root")
    runtime = make("docker", host=host, memory_mb=256)
    async with started(runtime, session_id="dying") as sandbox:
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            (container,) = client.containers.list(filters={"label": f"{SESSION_LABEL}=dying"})
        yield sandbox, container.attrs["State"]["Pid"]
    await runtime.close()


async def test_a_command_in_a_container_that_dies_is_an_error(docker_host: str):
    """Docker gives a command in a dying container an exit code, 126 or 137, which once counted as the command's own: a
    harness that had lost its sandbox counted as one that had ended by itself."""
    for _ in range(5):
        async with docker_and_its_first_process(docker_host) as (sandbox, first):
            waits = Command(argv=["python3", "-c", "import time; time.sleep(1000)"])
            running = asyncio.create_task(sandbox.exec(waits))
            await asyncio.wait({running}, timeout=1)
            os.kill(first, signal.SIGKILL)
            reason = "the sandbox is gone: it was evicted: its container was ended with exit code 137"
            with pytest.raises(SandboxError, match=reason):
                await running


async def test_a_command_that_costs_a_container_its_memory_is_to_blame(docker_host: str):
    """Guards against a mask: an agent whose processes are the smallest has the kernel kill the container's PID 1."""
    for _ in range(5):
        async with docker_and_its_first_process(docker_host) as (sandbox, first):
            await sh(sandbox, "echo kept | tee kept > ~/kept")
            Path(f"/proc/{first}/oom_score_adj").write_text("1000")  # the kernel's first choice
            assert (await sandbox.exec(Command(argv=["python3", "-c", ALLOCATE]))).exit_code == 137
            assert (await sh(sandbox, "cat kept ~/kept; id -u")).stdout.startswith(b"kept\nkept\n20")


async def test_a_command_of_a_living_container_keeps_its_exit_code(docker_host: str):
    runtime = make("docker", host=docker_host)
    async with started(runtime) as sandbox:
        codes = [(await sh(sandbox, script)).exit_code for script in ("exit 126", "kill -KILL $$", "exit 7")]
    assert codes == [126, 137, 7]
    await runtime.close()


def test_containers_of_one_daemon_begin_at_a_pace_that_all_runtimes_share():
    host = "unix:///nowhere/a.sock"
    begun = time.monotonic()
    for starts in (Starts.of(host), Starts.of(host), Starts.of(host)):
        starts.wait(per_second=10)
    assert time.monotonic() - begun >= 0.2
    begun = time.monotonic()
    Starts.of("unix:///nowhere/b.sock").wait(per_second=0.01)
    assert time.monotonic() - begun < 5, "another daemon's starts were waited for"


async def test_workspace_is_not_copied_where_overlays_can_be_mounted(tmp_path: Path):
    need_bubblewrap()
    runtime = make("bubblewrap", scratch=tmp_path)
    lacking = [caveat for caveat in await asyncio.to_thread(runtime.caveats) if "overlay" in caveat]
    need(not lacking, f"overlays ({lacking})", "a kernel >= 5.11")
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(bytes(8 << 20))
    async with started(runtime, workspace=source) as sandbox:
        assert isinstance(sandbox, BubblewrapSandbox)
        assert sandbox.disk is not None
        await sh(sandbox, "echo new > small")
        if os.geteuid() == 0:  # another user's overlays cannot copy a file's mode without its content
            await sh(sandbox, "chmod 600 big")
        (scratch,) = tmp_path.glob("polar-gym-*")
        assert (sandbox.disk.seen(scratch / "disk" / "upper") / "small").read_text() == "new\n"
        on_disk = sum(path.lstat().st_blocks * 512 for path in scratch.rglob("*"))
        assert on_disk < 1 << 20
    assert (source / "big").stat().st_size == 8 << 20
    await runtime.close()


async def test_auto_asks_a_silent_daemon_off_the_event_loop_and_hands_its_options_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    need_bubblewrap()
    asked = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await hang_up.wait()
        writer.close()

    hang_up = asyncio.Event()
    daemon = tmp_path / "d.sock"
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{daemon}")
    runtime = make("auto", scratch=scratch, memory_mb=256)
    async with await asyncio.start_unix_server(listen, daemon), asyncio.TaskGroup() as group:
        starting = group.create_task(_look_at(runtime, scratch))
        await asyncio.wait_for(asked.wait(), 60)  # never comes to be, where the loop itself waits for the daemon
        hang_up.set()
    assert starting.result() == 1
    assert list(scratch.iterdir()) == []
    await runtime.close()


async def _look_at(runtime: Runtime, scratch: Path) -> int:
    """How many sandboxes have their files in the scratch directory while one runs; its memory is limited."""
    async with started(runtime) as sandbox:
        result = await sandbox.exec(Command(argv=["python3", "-c", "x = b'x' * (1 << 30)"]))
        assert result.exit_code not in (0, None)
        return len(list(scratch.iterdir()))


@of_own
async def test_what_the_kernel_tells_of_the_machine_is_hidden(sandbox: Sandbox, request: pytest.FixtureRequest):
    """Interrupts tell of other sessions' work. The kernel's own settings stay readable."""
    files = "/proc/keys /proc/timer_list"
    if request.node.callspec.params["make_runtime"] != "docker":  # an older daemon shows it
        files += " /proc/interrupts"
    script = f"cat {files}; ls -A /proc/acpi /proc/scsi /sys/firmware 2> /dev/null"
    said = (await sh(sandbox, f"cat /proc/sys/kernel/ostype; ({script}) | grep -v :$ | grep .")).stdout.decode()
    assert said == "Linux\n"


async def test_a_crash_leaves_no_core(sandbox: Sandbox):
    """The machine's handler of cores would read a file that the agent made."""
    assert (await sh(sandbox, "ulimit -H -c")).stdout == b"0\n"


async def test_agent_has_no_rights(sandbox: Sandbox):
    """Uid 0 without capabilities still owns /proc/sys: with it, `core_pattern` would run commands on the host."""
    status = (await sh(sandbox, "grep -E '^(Uid|Gid|CapPrm|CapEff|NoNewPrivs)' /proc/self/status")).stdout.decode()
    seen = {line.split()[0]: line.split()[1] for line in status.splitlines()}
    assert "0" not in (seen.pop("Uid:"), seen.pop("Gid:"))
    assert seen == {"NoNewPrivs:": "1", "CapPrm:": "0" * 16, "CapEff:": "0" * 16}
    result = await sh(sandbox, "f=/proc/sys/vm/swappiness; value=$(cat $f); echo $value > $f")
    assert result.exit_code != 0, "a sandbox can write the host's kernel settings"
