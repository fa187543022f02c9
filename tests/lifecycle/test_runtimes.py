"""Every runtime keeps the same promises about commands, files and what is left at the end."""

import asyncio
import contextlib
import errno
import io
import json
import os
import resource
import select
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.runtimes import HOME, Command, Mount, Runtime, Sandbox, SandboxError, SandboxRequest, agent
from polar_gym.runtimes.docker.sandbox import SESSION_LABEL, remove_container
from polar_gym.runtimes.files import read_file, write_files
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.skeleton import skeleton
from polar_gym.schema import RuntimeSpec, Workspace
from tests.lifecycle.runtime_kinds import MakeRuntime, Marked, make, make_runtime, of_own, runtime, sandbox, sh, started
from tests.support import apptainer
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_bubblewrap

__all__ = ["docker_host", "make_runtime", "runtime", "sandbox"]


async def test_command_gets_its_environment_directory_and_input(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GATEWAY_SECRET", "not for the sandbox")
    async with started(runtime, environment={"FROM_TASK": "task", "BOTH": "task"}) as sandbox:
        script = 'echo "$FROM_TASK $BOTH $HOME $GATEWAY_SECRET."; pwd; cat; echo problem >&2; exit 7'
        result = await sh(sandbox, script, environment={"BOTH": "command"}, stdin=b"input", workdir="/tmp")
    assert result.stdout.decode().splitlines() == [f"task command {HOME} .", "/tmp", "input"]
    assert result.stderr == b"problem\n"
    assert result.exit_code == 7
    assert not result.timed_out


async def test_stdin_of_any_length_is_closed_after_its_bytes(sandbox: Sandbox):
    data = bytes(range(256)) * 20_000
    assert (await sh(sandbox, "wc -c")).stdout == b"0\n"
    assert (await sandbox.exec(Command(argv=["cat"], stdin=data))).stdout == data
    unread = await sandbox.exec(Command(argv=["true"], stdin=data))
    assert unread.exit_code == 0


async def test_missing_program_is_a_failed_command(sandbox: Sandbox):
    result = await sandbox.exec(Command(argv=["no-such-program"]))
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


async def test_killed_command_has_a_shells_exit_code(sandbox: Sandbox):
    assert (await sh(sandbox, "kill -KILL $$")).exit_code == 137


async def test_output_keeps_both_ends(sandbox: Sandbox):
    result = await sh(sandbox, "echo first; yes | head -c 3000000; echo last", output_limit=1000)
    assert result.stdout.startswith(b"first\ny\ny\n")
    assert result.stdout.endswith(b"y\ny\nlast\n")
    assert b"\n[... %d bytes dropped ...]\n" % (3_000_011 - 1000) in result.stdout
    assert len(result.stdout) < 1100


@given(st.lists(st.binary(max_size=40)), st.integers(2, 60))
def test_output_holds_no_more_than_its_limit(chunks: list[bytes], limit: int):
    output, whole = Output(limit), b"".join(chunks)
    for chunk in chunks:
        output.feed(chunk)
        assert len(output._head) + len(output._tail) <= limit
    if len(whole) <= limit:
        assert output.value() == whole
    else:
        marker = b"\n[... %d bytes dropped ...]\n" % (len(whole) - limit)
        assert output.value() == whole[: limit // 2] + marker + whole[len(whole) - (limit - limit // 2) :]


async def test_time_limit_kills_what_hides_in_another_session(sandbox: Sandbox):
    """Killing the command's process group, or the client of `docker exec`, leaves a setsid grandchild alive."""
    silent, loud = Marked(), Marked()
    script = f"setsid {silent.command} > /dev/null 2>&1 & setsid sh -c 'echo up; {loud.command}' & wait"
    result = await sh(sandbox, script, timeout_seconds=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"up\n")
    await silent.until(alive=False)
    await loud.until(alive=False)
    assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"


async def test_time_limit_ends_a_fork_bomb(make_runtime: MakeRuntime):
    runtime = make_runtime()
    async with started(runtime) as sandbox:
        bomb = Marked()
        script = f"i=0; while [ $i -lt 40 ]; do (while :; do {bomb.command} & {bomb.command}; done) & i=$((i+1)); done"
        assert (await sh(sandbox, f"{script}; wait", timeout_seconds=0.5, output_limit=100)).timed_out
        await bomb.until(alive=False)
    await runtime.close()


async def test_nothing_outlives_its_command(sandbox: Sandbox):
    left = Marked()
    result = await sh(sandbox, f"setsid {left.command} > /dev/null 2>&1 & echo done")
    assert result.stdout == b"done\n"
    await left.until(alive=False)


KILL_SHELLS = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if (process / "comm").read_text().strip() in ("sh", "dash", "timeout"):
            os.kill(int(process.name), signal.SIGKILL)
    except OSError:
        pass
"""


async def test_nothing_outlives_a_command_that_kills_its_shell(sandbox: Sandbox):
    """Guards against an agent that goes on during its diff: it had killed the shell that ends what a command left."""
    left = Marked()
    script = f"setsid {left.command} > /dev/null 2>&1 & exec setsid python3 -c '{KILL_SHELLS}' > /dev/null 2>&1"
    await sh(sandbox, script)
    await left.until(alive=False)
    assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"


async def test_cancelling_kills(sandbox: Sandbox):
    child = Marked()
    task = asyncio.create_task(sh(sandbox, f"setsid {child.command} & wait"))
    await child.until(alive=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await child.until(alive=False)
    assert (await sh(sandbox, "echo usable")).stdout == b"usable\n"


async def test_workspace_is_a_copy_and_files_last(runtime: Runtime, tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run").chmod(0o755)
    (source / "link").symlink_to("sub/run")
    (source / "empty").mkdir()
    async with started(runtime, workspace=source) as sandbox:
        assert (await sh(sandbox, "ls -A; ./link; pwd")).stdout == b"empty\nlink\nsub\nran\n/workspace\n"
        await sh(sandbox, "echo changed > sub/run; rm link; echo kept > /tmp/kept; echo kept > ~/kept")
        assert (await sh(sandbox, "cat sub/run /tmp/kept ~/kept")).stdout == b"changed\nkept\nkept\n"
    assert (source / "sub" / "run").read_text() == "#!/bin/sh\necho ran\n"
    assert (source / "link").is_symlink()


async def test_mounts_are_read_only(runtime: Runtime, tmp_path: Path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_text("tool")
    (tmp_path / "tool" / "file").chmod(0o666)
    mounts = [Mount(tmp_path / "tool", "/opt/polar-gym/x/node_modules"), Mount(tmp_path / "tool" / "file", "/opt/f")]
    async with started(runtime, mounts=mounts) as sandbox:
        result = await sh(sandbox, "cat /opt/polar-gym/x/node_modules/file /opt/f; echo x > /opt/f || echo refused")
    assert result.stdout == b"tooltoolrefused\n"
    assert (tmp_path / "tool" / "file").read_text() == "tool"


@pytest.mark.parametrize("make_runtime", ["bubblewrap"], indirect=True)
@pytest.mark.parametrize("path", [f"{HOME}/a/repo", "/tmp/a/repo", "/opt"])
async def test_no_link_above_a_mount_point_leads_bwrap_out_of_the_sandbox(runtime: Runtime, tmp_path: Path, path: str):
    """Guards against directories of the machine's root: `bwrap` makes mount points, and sees the machine at `/oldroot`.

    The workspace is below another directory of the agent, or a mount is below the workspace.
    """
    (outside := tmp_path / "outside").mkdir()
    (tmp_path / "tool").mkdir()
    mounts = [Mount(tmp_path / "tool", "/opt/a/tool/x")]
    spec = RuntimeSpec(name="bubblewrap", workspace=Workspace(path=path))
    above = "/opt/a" if path == "/opt" else str(Path(path).parent)
    async with started(runtime, mounts=mounts, spec=spec) as sandbox:
        moved = await sh(sandbox, f"cd /; mv {above} {above}-moved && ln -s /oldroot{outside} {above}")
        assert (moved.exit_code, b"busy" in moved.stderr) == (1, True)
        assert (await sh(sandbox, "pwd; ls /opt/a/tool")).stdout == f"{path}\nx\n".encode()
    assert list(outside.iterdir()) == []


async def test_the_tasks_environment_is_not_for_the_programs_that_start_the_command(runtime: Runtime):
    """Guards against an LD_PRELOAD of a request that root's programs load, in a sandbox without a user namespace."""
    told = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": "/tmp/loader"}
    async with started(runtime, environment=told) as sandbox:
        await sandbox.exec(Command(argv=["true"]))
        seen = await sh(sandbox, "unset LD_DEBUG; id -u; stat -c %u /tmp/loader.* | sort -u")
    agent, *others = seen.stdout.split()
    assert others == [agent]


async def test_missing_mount_is_named(runtime: Runtime, tmp_path: Path):
    with pytest.raises(SandboxError, match=r"no-such-directory"):
        async with started(runtime, mounts=[Mount(tmp_path / "no-such-directory", "/opt/x")]) as sandbox:
            await sandbox.exec(Command(argv=["true"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, sandboxes with such a mount share the gateway's uid")
async def test_a_mount_that_roots_agent_may_not_read_is_named(tmp_path: Path):
    """Guards against a harness that lacked its packages, where a warning alone told of something else."""
    need_bubblewrap()
    (tmp_path / "tool").mkdir(mode=0o700)
    with pytest.raises(SandboxError, match=r"the agent may not read .*/tool, .*: chmod -R o\+rX it"):
        async with started(make("bubblewrap"), mounts=[Mount(tmp_path / "tool", "/opt/x")]):
            pass


async def test_missing_mount_is_named_if_bwrap_has_ended_when_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a busy machine its failure was once told as a kill from outside."""
    find = os.pidfd_open

    def find_too_late(pid: int, *flags: int) -> int:
        descriptor = find(pid, *flags)
        parent = f"PPid:\t{os.getpid()}\n"
        if pid == os.getpid() or parent in Path(f"/proc/{pid}/status").read_text():  # asyncio's own looks
            return descriptor
        select.select([descriptor], [], [])
        os.close(descriptor)
        raise ProcessLookupError

    runtime = make("bubblewrap")
    need(not runtime.check(), "a working bubblewrap", "; ".join(runtime.check()))
    monkeypatch.setattr(os, "pidfd_open", find_too_late)
    await test_missing_mount_is_named(runtime, tmp_path)


async def test_missing_mount_is_named_if_bwrap_ends_while_its_limits_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a busy machine the error said "No such process", and not why."""

    def set_too_late(pid: int, *_: object) -> None:
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [])
        os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    runtime = make("bubblewrap")
    need(not runtime.check(), "a working bubblewrap", "; ".join(runtime.check()))
    monkeypatch.setattr(resource, "prlimit", set_too_late)
    await test_missing_mount_is_named(runtime, tmp_path)


async def test_host_is_out_of_sight(sandbox: Sandbox, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    assert (await sh(sandbox, 'cat "$1"', str(secret))).exit_code != 0
    there = "/root/* /root/.[!.]* /etc/shadow /etc/ssh /var/run/docker.sock /run/docker.sock /var/lib/docker"
    assert (await sh(sandbox, f"ls -d {there} 2> /dev/null; ls /home")).stdout == b"agent\n"
    # The processes that it sees are its own; the gateway's is not among them.
    seen = await sh(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert b"cat" in seen.stdout
    assert b"pytest" not in seen.stdout


async def test_files_round_trip(sandbox: Sandbox):
    files: dict[str, str | bytes] = {
        f"{HOME}/.config/deep/down/settings.json": "{}",
        "/workspace/name with ümlaut": "text ü",
        "/tmp/binary": bytes(range(256)) * 1000,
    }
    await write_files(sandbox, files)
    for path, content in files.items():
        assert await read_file(sandbox, path) == (content.encode() if isinstance(content, str) else content)
    with pytest.raises(FileNotFoundError, match="/tmp/nothing"):
        await read_file(sandbox, "/tmp/nothing")
    with pytest.raises(SandboxError, match=r"could not be written"):
        await write_files(sandbox, {"/usr/polar": "no"})


async def test_stop_leaves_nothing(runtime: Runtime, tmp_path: Path, request: pytest.FixtureRequest):
    running = Marked()
    async with started(runtime, session_id="leaves/nothing") as sandbox:
        await sh(sandbox, "mkdir -p ~/locked/in /tmp/locked; chmod 000 ~/locked /tmp/locked")
        task = asyncio.create_task(sh(sandbox, running.command))
        await running.until(alive=True)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await task
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await sandbox.exec(Command(argv=["true"]))
    await running.until(alive=False)
    assert list((tmp_path / "scratch").iterdir()) == []
    if type(runtime).__name__ == "Docker":
        assert _containers(request.getfixturevalue("docker_host"), "leaves/nothing") == []


DEEP = """
import os
for _ in range(3000):
    os.mkdir("deeper")
    os.chdir("deeper")
os.chmod(".", 0)
"""


async def test_stop_removes_what_is_deeper_than_python_can_follow(runtime: Runtime, tmp_path: Path):
    """`shutil.rmtree` keeps a file open for each level, and before Python 3.13 calls itself: such a sandbox stayed, and
    took its session's reward along."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with started(runtime) as sandbox:
        for directory in ("/workspace", "/tmp", HOME):
            made = await sandbox.exec(Command(argv=["python3", "-c", DEEP], workdir=directory))
            assert made.exit_code == 0, made.stderr
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))
        try:
            await sandbox.stop()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    assert list((tmp_path / "scratch").iterdir()) == []


VICTIM = """
import asyncio, json, sys
from tests.lifecycle.runtime_kinds import make, sh, started, gateway
kind, options, session_id, command = json.loads(sys.argv[1])
async def main():
    async with started(make(kind, **options), session_id=session_id, serve=gateway("x")) as sandbox:
        await sh(sandbox, command, timeout_seconds=1000)
asyncio.run(main())
"""


async def test_sandboxes_of_a_killed_gateway_are_reaped(
    make_runtime: MakeRuntime, tmp_path: Path, request: pytest.FixtureRequest
):
    scratch, orphan = tmp_path / "scratch", Marked()
    runtime = make_runtime()
    options: dict[str, Any] = {"scratch": str(scratch.resolve())}
    kind = type(runtime).__name__.lower()
    if kind == "docker":
        options |= {"host": request.getfixturevalue("docker_host")}
    elif kind == "apptainer":
        options |= {"program": apptainer.program()}
    elif kind == "remote":
        options |= {"provider": "boxes"}
    argument = json.dumps([kind, options, "victim-1", orphan.command])
    path = os.environ | {"PYTHONPATH": f"{tmp_path / 'installed'}:{Path.cwd()}"}
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", VICTIM, argument, env=path)
    try:
        await orphan.until(alive=True)
    finally:
        victim.kill()
        await victim.wait()
    async with started(runtime, session_id="victim") as bystander:
        assert len(list(scratch.iterdir())) >= 1
        assert await runtime.reap(["nobody"]) == 0
        assert await runtime.reap(["victim-1", "nobody"]) == 1
        await orphan.until(alive=False)
        assert (await sh(bystander, "echo untouched")).stdout == b"untouched\n"
    assert list(scratch.iterdir()) == []
    if kind == "docker":
        assert _containers(request.getfixturevalue("docker_host"), "victim-1") == []
    await runtime.close()


@of_own
async def test_a_package_below_usr_is_hidden(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    """Guards against agents that read the solutions and hidden tests of the bundled tasks where pip has installed the
    package below /usr. Another directory there stands for the package."""
    assert any(Path("/usr/share").iterdir())
    monkeypatch.setattr(agent, "OWN", Path("/usr/share"))
    async with started(runtime) as box:
        seen = await sh(box, "find /usr/share -mindepth 1; touch /usr/share/new; cd /usr/bin && [ -x env ] && echo ok")
    assert (seen.exit_code, seen.stdout) == (0, b"ok\n"), seen.stdout[:200]
    assert b"Read-only file system" in seen.stderr or b"Permission denied" in seen.stderr


async def test_a_daemon_with_another_usr_needs_an_image(docker_host: str, monkeypatch: pytest.MonkeyPatch):
    """Guards against an error of the daemon's that no user understands: it lacks the directory that is to be hidden."""
    monkeypatch.setattr(agent, "OWN", Path("/usr/no-such-directory"))
    with pytest.raises(SandboxError, match=r"runtime\.image is not set, and the daemon's /usr is not the gateway's"):
        async with started(make("docker", host=docker_host)):
            pass


async def test_missing_image_is_named_with_the_command_that_gets_it(docker_host: str):
    spec = RuntimeSpec(name="docker", image="registry.invalid/none:1")
    with pytest.raises(SandboxError, match=r"runtime\.image.*docker pull registry\.invalid/none:1"):
        await make("docker", host=docker_host).start(SandboxRequest(session_id="s", spec=spec, workspace=None))
    bare = make("docker", host=docker_host, host_usr=False)
    with pytest.raises(SandboxError, match=r"runtime\.image is not set"):
        await bare.start(SandboxRequest(session_id="s", spec=RuntimeSpec(name="docker"), workspace=None))


@pytest.fixture
def image(docker_host: str) -> Iterator[str]:
    """An image with a repository of root's, a variable, and no user of ours; it needs a /usr."""
    tag = f"polar-gym/test:{uuid.uuid4().hex}"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(skeleton())) as base, tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in base:
            if entry.name != "etc/passwd":
                tar.addfile(entry, base.extractfile(entry) if entry.isreg() else None)
        for name, text in {
            "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
            "testbed/locked/code.py": "x = 1\n",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o600 if "code" in name else 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    client = docker.DockerClient(base_url=docker_host)
    changes = ["ENV PATH=/opt/conda/bin:/usr/bin:/bin", "ENV CONDA=yes", 'ENTRYPOINT ["/no/such/entrypoint"]']
    client.api.import_image_from_data(buffer.getvalue(), repository="polar-gym/test", tag=tag[15:], changes=changes)
    yield tag
    client.images.remove(tag)
    client.close()


async def test_image_keeps_its_environment_and_its_files_become_the_agents(docker_host: str, image: str):
    spec = RuntimeSpec(name="docker", image=image, workspace=Workspace(path="/testbed"))
    runtime = make("docker", host=docker_host)
    async with started(runtime, spec=spec, mounts=[Mount(Path("/usr"), "/usr")]) as sandbox:
        result = await sh(
            sandbox, "echo x = 2 > locked/code.py; cat locked/code.py; id -un; echo $CONDA $PATH $HOME; pwd"
        )
    expected = f"x = 2\nagent\nyes /opt/conda/bin:/usr/bin:/bin {HOME}\n/testbed\n"
    assert result.stdout.decode() == expected, result.stderr
    await runtime.close()


async def test_absent_daemon_is_named_with_the_way_to_get_one(tmp_path: Path):
    runtime = make("docker", host=f"unix://{tmp_path}/none.sock")
    (message,) = runtime.check()
    assert f"{tmp_path}/none.sock" in message
    assert "apt-get install docker.io" in message


async def test_absent_bwrap_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "bwrap is missing; install it with: apt-get install bubblewrap" in make("bubblewrap").check()
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        async with started(make("bubblewrap")):
            pass


async def test_limits_of_a_process(make_runtime: MakeRuntime):
    runtime = make_runtime(memory_mb=256)
    async with started(runtime) as sandbox:
        result = await sandbox.exec(Command(argv=["python3", "-c", "x = b'x' * (1 << 30); print(len(x))"]))
    assert result.exit_code not in (0, None)
    assert b"1073741824" not in result.stdout
    await runtime.close()


def _containers(host: str, session_id: str) -> list[Any]:
    client = docker.DockerClient(base_url=host)
    try:
        return client.containers.list(all=True, filters={"label": f"{SESSION_LABEL}={session_id}"})
    finally:
        client.close()


async def test_a_command_can_be_cancelled_at_every_step_of_its_start(sandbox: Sandbox):
    """Guards against waiting for ever for pipes that were never connected, and against a `bwrap` that was killed before
    it had told its PID 1 to go on: that stayed."""
    async with asyncio.timeout(60):
        command = Marked()
        for steps in range(0, 60, 2):
            running = asyncio.create_task(sh(sandbox, command.command))
            for _ in range(steps):
                await asyncio.sleep(0.0004)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await command.until(alive=False)


@pytest.mark.parametrize("make_runtime", ["bubblewrap"], indirect=True)
async def test_a_command_that_is_cancelled_twice_leaves_nothing(sandbox: Sandbox):
    """Guards against a `bwrap` and descriptors that stayed, because the second time interrupted their end."""
    async with asyncio.timeout(300):
        await sh(sandbox, "true")
        command, before = Marked(), descriptors()
        for steps in range(0, 60, 3):
            for between in (1, 4):
                running = asyncio.create_task(sh(sandbox, command.command))
                for _ in range(steps):
                    await asyncio.sleep(0.0004)
                for _ in range(between):
                    running.cancel()
                    await asyncio.sleep(0)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
        await command.until(alive=False)
        deadline = time.monotonic() + 60
        while (left := descriptors() - before) > 0:  # asyncio closes pipes a moment later
            assert time.monotonic() < deadline, f"{left} descriptors stayed"
            await asyncio.sleep(0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


DEATHS = {
    "it was evicted: somebody removed its container": lambda client, name: remove_container(client, name),
    "it was evicted: its container was ended with exit code 137": lambda client, name: client.api.kill(name),
    "it expired after 86400 s, the sum of its session's budgets": lambda client, name: client.api.wait(name, 60),
}
"""Reason -> what happens to a container, which ends by itself where nothing does."""


@pytest.mark.parametrize("reason", DEATHS)
async def test_a_container_that_dies_says_why(docker_host: str, monkeypatch: pytest.MonkeyPatch, reason: str):
    """The error once was the daemon's: a conflict, or a container that it does not know."""
    if "expired" in reason:
        monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.WAIT", "sleep 3")
    runtime = make("docker", host=docker_host)
    async with started(runtime, session_id="dies") as sandbox:
        (container,) = _containers(docker_host, "dies")
        with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
            await asyncio.to_thread(DEATHS[reason], client, container.id)
        with pytest.raises(SandboxError, match=f"the sandbox is gone: {reason}"):
            await sh(sandbox, "true")
    await runtime.close()
