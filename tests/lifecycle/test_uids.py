"""Each sandbox has a uid of its own, where the gateway is root or asks Docker for its sandboxes."""

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from polar_gym.runtimes import HOME, Command, Mount, Runtime, Sandbox, SandboxError
from polar_gym.runtimes.kernel import uids
from polar_gym.runtimes.skeleton import skeleton
from polar_gym.schema import RuntimeSpec, Workspace
from tests.lifecycle.runtime_kinds import MakeRuntime, Marked, make, make_runtime, of_own, runtime, sh, started
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_bubblewrap, need_program

__all__ = ["docker_host", "make_runtime", "runtime"]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="without root, all sandboxes have the gateway's uid")


async def identity(sandbox: Sandbox, tmp_path: Path) -> int:
    """The uid of a sandbox's processes and files, which must be the same number on the host, and of the gid too."""
    running = Marked()
    task = asyncio.create_task(sh(sandbox, f"touch ~/own /tmp/own own; {running.command}"))
    await running.until(alive=True)
    (pid,) = running.pids()
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    script = f"id -u; id -g; stat -c '%u\n%g' {HOME} ~/own /tmp/own . own; id -un; id -gn"
    *numbers, user, group = (await sh(sandbox, script)).stdout.decode().split()
    assert (user, group) == ("agent", "agent")
    scratch = Path(getattr(sandbox, "scratch", getattr(getattr(sandbox, "instance", None), "scratch", tmp_path)))
    numbers += [str(file.lstat().st_uid) for file in scratch.rglob("own")]
    numbers += [*status["Uid"].split(), *status["Gid"].split()]
    (uid,) = set(numbers)
    return int(uid)


@of_own
@as_root
async def test_each_sandbox_has_a_uid_of_its_own(runtime: Runtime, tmp_path: Path):
    """All had 1000: a harness's sandbox, the one that grades its work, and those of all other sessions."""
    (workspace := tmp_path / "workspace").mkdir()
    async with started(runtime, workspace=workspace) as one, started(runtime, session_id="other") as other:
        found = [await identity(sandbox, tmp_path / "none") for sandbox in (one, other)]
    async with started(runtime, workspace=workspace) as grading:
        found.append(await identity(grading, tmp_path / "none"))
    assert len({*found, 0, 1000}) == 5


TAKE_ALL = """
import ctypes, os, resource, sys
files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
taken = 0
while ctypes.CDLL(None).inotify_init1(0) >= 0:
    taken += 1
print(taken, flush=True)
program = sys.argv[1].split()
os.execvp(program[0], program)
"""
"""Takes all inotify instances that the kernel gives to a uid, and holds them while another program runs."""


@as_root
@pytest.mark.parametrize("make_runtime", ["bubblewrap", "docker"], indirect=True)
async def test_no_sandbox_uses_up_what_the_kernel_allows_a_uid(runtime: Runtime):
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    need(limit <= 8192, "a limit of inotify instances", "sysctl fs.inotify.max_user_instances=128")
    holding = Marked()
    async with started(runtime) as greedy, started(runtime, session_id="other") as other:
        argv = ["python3", "-c", TAKE_ALL, holding.command]
        held = asyncio.create_task(greedy.exec(Command(argv=argv)))
        await holding.until(alive=True)
        taken = await other.exec(Command(argv=["python3", "-c", TAKE_ALL, "true"]))
        held.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await held
    assert int(taken.stdout) == limit


GATEWAY = """
import asyncio, json, sys
from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.kernel import uids
from tests.lifecycle.runtime_kinds import make, started, sh
kind, options, first, count = json.loads(sys.argv[1])
uids.RANGES = (range(first, first + count),)
async def main():
    async with started(make(kind, **options), session_id="victim") as sandbox:
        print((await sh(sandbox, "id -u")).stdout.decode().strip(), flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


@as_root
async def test_uids_are_shared_among_gateways_and_free_again_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    need_bubblewrap()
    first = 1_900_000 + os.getpid() % 90_000
    monkeypatch.setattr(uids, "RANGES", (range(first, first + 2),))
    request = json.dumps(["bubblewrap", {"scratch": str(tmp_path)}, first, 2])
    argv = [sys.executable, "-c", GATEWAY, request]
    other = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        its = int(await other.stdout.readline())
        runtime = make("bubblewrap", scratch=tmp_path)
        async with started(runtime) as sandbox:
            mine = int((await sh(sandbox, "id -u")).stdout)
            assert {its, mine} == {first, first + 1}
            with pytest.raises(SandboxError, match="all 2 uids of sandboxes are in use"):
                async with started(runtime):
                    pass
            other.kill()
            await other.wait()
            async with started(runtime, session_id="heir") as heir:
                assert int((await sh(heir, "id -u")).stdout) == its
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()


@as_root
@pytest.mark.parametrize(("mapped", "answer"), [(65_536, "[2-5][0-9]{4}"), (1000, ".*map 20000 to 52767 into it")])
def test_root_in_a_user_namespace_takes_uids_that_exist_there(mapped: int, answer: str):
    """As in a container: `chown` and `setpriv` know no others."""
    need_program("unshare", "apt-get install util-linux")
    claim = "from polar_gym.runtimes.kernel import uids; print(uids.claim().uid)"
    argv = ["unshare", "--user", "sh", "-c", 'echo ready; read go; exec "$@" 2>&1', "sh", sys.executable, "-c", claim]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for kind in ("uid", "gid"):
            Path(f"/proc/{process.pid}/{kind}_map").write_text(f"0 0 {mapped}")
        said, _ = process.communicate("go\n", timeout=60)
    assert re.fullmatch(answer, said.splitlines()[-1])


@pytest.fixture
def image(docker_host: str) -> Iterator[str]:
    """An image that was made for its user 1000, with a directory that is closed to all others."""
    tag = uuid.uuid4().hex
    buffer = io.BytesIO(skeleton())
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        entry = tarfile.TarInfo("opt/tools")
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, 1000, 1000
        tar.addfile(entry)
    with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
        content, changes = buffer.getvalue(), ["USER 1000:1000", "ENV PATH=/usr/bin:/bin"]
        client.api.import_image_from_data(content, repository="polar-gym/test", tag=tag, changes=changes)
        yield f"polar-gym/test:{tag}"
        client.images.remove(f"polar-gym/test:{tag}")


async def test_image_that_was_made_for_a_user_keeps_the_uid_1000(docker_host: str, image: str):
    spec = RuntimeSpec(name="docker", image=image, workspace=Workspace(path="/testbed"))
    runtime = make("docker", host=docker_host)
    async with started(runtime, spec=spec, mounts=[Mount(Path("/usr"), "/usr")]) as sandbox:
        result = await sh(sandbox, "id -u; id -g; touch /opt/tools/new && echo made")
    assert result.stdout.split() == [b"1000", b"1000", b"made"], result.stderr
    await runtime.close()


SHARE = """
import multiprocessing, sys
from multiprocessing import shared_memory
def work(queue, name):
    memory = shared_memory.SharedMemory(name)
    memory.buf[:5] = b"child"
    memory.close()
    queue.put("done")
if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=work, args=(queue, memory.name))
    child.start()
    print(queue.get(), bytes(memory.buf[:5]).decode())
    child.join()
    memory.close()
    memory.unlink()
"""


@of_own
async def test_processes_of_a_sandbox_share_memory_and_no_other_sandbox_sees_it(runtime: Runtime):
    """/dev/shm was there and could not be written: `multiprocessing` failed."""
    holding = Marked()
    async with started(runtime) as sandbox, started(runtime, session_id="other") as other:
        shared = await sandbox.exec(Command(argv=["python3", "-c", SHARE]))
        assert shared.stdout == b"done child\n", shared.stderr
        task = asyncio.create_task(sh(sandbox, f"echo secret > /dev/shm/mine && {holding.command}"))
        await holding.until(alive=True)
        assert (await sh(other, "ls -A /dev/shm; ls -ld /dev/shm | cut -c1-10")).stdout == b"drwxrwxrwt\n"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert not any(Path("/dev/shm").glob("mine"))


@pytest.mark.parametrize("make_runtime", ["bubblewrap", "docker"], indirect=True)
async def test_shared_memory_is_bounded(make_runtime: MakeRuntime):
    """Apptainer's is bounded by the memory of the sandbox alone."""
    runtime = make_runtime()
    async with started(runtime) as sandbox:
        filled = await sh(sandbox, "head -c 100000000 /dev/zero > /dev/shm/big; stat -c %s /dev/shm/big")
    assert int(filled.stdout) == 64 << 20
    await runtime.close()
