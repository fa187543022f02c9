"""The laws of a sandbox, each tried in real sandboxes of any runtime. `conformance` is the program that tries them.

A law raises `AssertionError`, which says the difference, where it does not hold. The sandboxes need sh and python3.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from polar_gym.runtimes import (
    HOME,
    RUNTIMES,
    Command,
    ExecResult,
    Mount,
    Runtime,
    Sandbox,
    SandboxRequest,
    Serve,
    processes,
)
from polar_gym.runtimes.files import read_file, write_files
from polar_gym.schema import PluginSpec, RuntimeSpec
from polar_gym.workspaces.diff import apply_diff, snapshot_diff
from polar_gym.workspaces.repository import make_repository, pack_git_dir

MIB = 1 << 20
LAW_SECONDS = 120.0
APART_SECONDS = 30.0
END_SECONDS = 20.0
HOLD = "--hold"
SECONDS = str(10**6 + os.getpid())
SLEEP = f"sleep {SECONDS}"
RUNNING = f"""
import pathlib
print(sum(b"{SECONDS}" in each.read_bytes().split(b"\\0") for each in pathlib.Path("/proc").glob("[0-9]*/cmdline")))
"""
"""A Python program that prints how many such processes it sees."""

GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode(), end='')"
KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
FORK = """
import os, time
for number in range(300):
    try:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
    except OSError:
        print("refused", end="")
        break
"""
WORK = """
set -e
chmod +x plain && chmod -x run && rm -r gone folder && echo file > folder && mkdir empty new
ln -sfn plain link && ln -s nowhere new/dangling && printf 'a\\0b\\377\\r\\n' > new/binary && printf end > "new/$1"
head -c 3000000 /dev/urandom > big && rm -rf .git
"""
"""The script by which an agent changes its workspace; the argument is the name of a file."""

TREE = """
import hashlib, os, pathlib
for each in sorted(pathlib.Path().rglob("*")):
    if each.is_symlink():
        print(ascii(str(each)), os.readlink(each))
    elif each.is_file() and ".git" not in each.parts:
        print(ascii(str(each)), os.access(each, os.X_OK), hashlib.sha256(each.read_bytes()).hexdigest())
"""
"""A Python program that prints what a workspace holds; git knows no empty directories."""

UNICODE = "naïve \u6f22\u5b57 \U0001f600\n.txt"


class Trial:
    """A runtime under trial, and what its sandboxes are asked for."""

    def __init__(self, runtime: Runtime, spec: RuntimeSpec, directory: Path) -> None:
        self.runtime = runtime
        self.spec = spec
        self.directory = directory

    @contextlib.asynccontextmanager
    async def sandbox(self, session_id: str = "conformance", **request: Any) -> AsyncIterator[Sandbox]:
        asked = {"workspace": None, "spec": self.spec, **request}
        sandbox = await self.runtime.start(SandboxRequest(session_id=session_id, **asked))
        try:
            yield sandbox
        finally:
            await sandbox.stop()


async def sh(sandbox: Sandbox, script: str, *arguments: str, **command: Any) -> ExecResult:
    return await sandbox.exec(Command(argv=["sh", "-c", script, "sh", *arguments], **command))


async def python(sandbox: Sandbox, program: str, *arguments: str) -> ExecResult:
    return await sandbox.exec(Command(argv=["python3", "-c", program, *arguments]))


def gateway(answer: str) -> Serve:
    """Return a gateway that answers every HTTP request with these words."""
    body = answer.encode()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async def serve(listener: socket.socket) -> asyncio.Server:
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        return await start(respond, sock=listener)

    return serve


def same(found: object, expected: object) -> None:
    """Raise `AssertionError` unless the two are equal."""
    if found != expected:
        raise AssertionError(f"{str(found)[:200]} in place of {str(expected)[:200]}")


async def environment_directory_input(trial: Trial) -> None:
    spec = trial.spec.model_copy(update={"environment": {"FROM_TASK": "task", "BOTH": "task"}})
    async with trial.sandbox(spec=spec) as box:
        script = 'echo "$FROM_TASK $BOTH $HOME"; pwd; cat; echo problem >&2; exit 7'
        done = await sh(box, script, environment={"BOTH": "command"}, stdin=b"input", workdir="/tmp")
    same(done.stdout, f"task command {HOME}\n/tmp\ninput".encode())
    same((done.stderr, done.exit_code), (b"problem\n", 7))


async def exact_bytes(trial: Trial) -> None:
    data = hashlib.shake_128(b"").digest(3 * MIB)
    async with trial.sandbox() as box:
        done = await box.exec(Command(argv=["cat"], stdin=data))
        same(hashlib.sha256(done.stdout).hexdigest(), hashlib.sha256(data).hexdigest())
        same((await box.exec(Command(argv=["true"], stdin=data))).exit_code, 0)


async def long_output(trial: Trial) -> None:
    async with trial.sandbox() as box:
        done = await sh(box, "echo first; yes | head -c 30000000; echo last", output_limit=1000)
    same((done.stdout[:6], done.stdout[-5:], len(done.stdout) < 1100), (b"first\n", b"last\n", True))


async def exit_codes(trial: Trial) -> None:
    async with trial.sandbox() as box:
        same((await box.exec(Command(argv=["no-such-program"]))).exit_code, 127)
        same((await sh(box, "kill -KILL $$")).exit_code, 137)


async def time_limit(trial: Trial) -> None:
    async with trial.sandbox() as box:
        done = await sh(box, f"setsid {SLEEP} > /dev/null 2>&1 & echo up; wait", timeout_seconds=5)
        same((done.exit_code, done.timed_out, done.stdout), (None, True, b"up\n"))
        same((await python(box, RUNNING)).stdout, b"0\n")


async def nothing_outlives_its_command(trial: Trial) -> None:
    async with trial.sandbox() as box:
        same((await sh(box, f"setsid {SLEEP} > /dev/null 2>&1 & echo done")).stdout, b"done\n")
        same((await python(box, RUNNING)).stdout, b"0\n")


async def cancelling(trial: Trial) -> None:
    async with trial.sandbox() as box:
        running = asyncio.create_task(sh(box, f"touch /tmp/up; {SLEEP}"))
        await asyncio.wait({running}, timeout=2)
        running.cancel()
        await asyncio.wait({running})
        same(running.cancelled(), True)
        same((await python(box, RUNNING)).stdout, b"0\n")


async def workspace(trial: Trial) -> None:
    source = trial.directory / "workspace"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / UNICODE).write_bytes(b"\x00\xff")
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("run")
    at = trial.spec.workspace.path
    async with trial.sandbox(workspace=source) as box:
        same((await sh(box, "./link; echo changed > run; touch ~/kept /tmp/kept")).stdout, b"ran\n")
        same((await sh(box, "cat run; ls ~/kept; ls /tmp/kept")).stdout, f"changed\n{HOME}/kept\n/tmp/kept\n".encode())
        same(await read_file(box, f"{at}/sub/{UNICODE}"), b"\x00\xff")
        await write_files(box, {f"{at}/{UNICODE}": b"\xff"})
        same(await read_file(box, f"{at}/{UNICODE}"), b"\xff")
    same((source / "run").read_text(), "#!/bin/sh\necho ran\n")


async def exact_diff(trial: Trial) -> None:
    (source := trial.directory / "source").mkdir()
    for name in ("plain", "run", "gone/deep/er", "folder/file"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"{name}\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("run")
    repository, at = trial.directory / "repository", trial.spec.workspace.path
    make_repository(source, repository)
    async with trial.sandbox(workspace=repository) as box:
        before = (await python(box, TREE)).stdout
        same((await sh(box, WORK, UNICODE)).stderr, b"")
        diff, after = await snapshot_diff(box, at, pack_git_dir(repository)), (await python(box, TREE)).stdout
    async with trial.sandbox(workspace=repository) as box:
        same((await python(box, TREE)).stdout, before)
        await apply_diff(box, at, diff)
        same((await python(box, TREE)).stdout, after)


async def mounts(trial: Trial) -> None:
    (tool := trial.directory / "tool").mkdir()
    (tool / "file").write_text("7")
    (tool / "file").chmod(0o666)
    async with trial.sandbox(mounts=[Mount(tool, "/opt/polar-gym/tool")]) as box:
        done = await sh(box, "cat /opt/polar-gym/tool/file; echo x > /opt/polar-gym/tool/file || echo refused")
    same(done.stdout, b"7refused\n")
    same((tool / "file").read_text(), "7")


async def its_own_gateway(trial: Trial) -> None:
    async with trial.sandbox(serve=gateway("x" * MIB)) as box:
        for _ in range(3):
            same(len((await python(box, GET, box.base_url)).stdout), MIB)


async def no_other_network(trial: Trial) -> None:
    async with trial.sandbox(serve=gateway("a")) as box:
        with socket.create_server(("127.0.0.1", 0)) as other:
            for address, port in (("127.0.0.1", other.getsockname()[1]), ("192.0.2.1", 9), ("169.254.169.254", 80)):
                said = (await python(box, KNOCK, address, str(port))).stderr.decode().strip().rpartition("\n")[2]
                same(("refused" in said or "unreachable" in said, said and address), (True, address))


async def network_none(trial: Trial) -> None:
    async with trial.sandbox(spec=trial.spec.model_copy(update={"network": "none"}), serve=gateway("a")) as box:
        same((await python(box, KNOCK, "127.0.0.1", "8080")).exit_code, 1)


async def no_gateway_for_graders(trial: Trial) -> None:
    async with trial.sandbox() as box:
        same((await python(box, KNOCK, "127.0.0.1", "8080")).exit_code, 1)


async def sandboxes_are_apart(trial: Trial) -> None:
    async with trial.sandbox() as one, asyncio.timeout(APART_SECONDS), trial.sandbox("other") as other:
        await sh(one, "echo secret | tee ~/mine /tmp/mine mine")
        same((await sh(other, "ls ~ /tmp .; cat ~/mine /tmp/mine mine")).stdout.count(b"mine"), 0)


async def no_rights(trial: Trial) -> None:
    async with trial.sandbox() as box:
        done = await sh(box, "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status | cut -f2")
    uid, *rest = done.stdout.decode().split()
    same((uid != "0", rest), (True, ["0" * 16, "1"]))


@contextlib.asynccontextmanager
async def limited(trial: Trial, **limits: int) -> AsyncIterator[Sandbox]:
    runtime = RUNTIMES.make(PluginSpec.model_validate({"name": trial.spec.name, **trial.spec.options, **limits}))
    async with Trial(runtime, trial.spec, trial.directory).sandbox() as box:
        yield box
    await runtime.close()


async def a_memory_limit(trial: Trial) -> None:
    async with limited(trial, memory_mb=256) as box:
        same((await python(box, "print(len(bytearray(b'x') * (1 << 30)))")).stdout, b"")


async def a_process_limit(trial: Trial) -> None:
    async with limited(trial, pids=100) as box:
        same((await python(box, FORK)).stdout, b"refused")


async def stop_leaves_nothing(trial: Trial) -> None:
    async with trial.sandbox() as box:
        await sh(box, "touch ~/left /tmp/left left; chmod 0 .; mkdir -p ~/deep/er; chmod 0 ~/deep")
    async with trial.sandbox() as box:
        same((await sh(box, "ls -A ~ .; ls /tmp | grep left")).stdout.count(b"left"), 0)


async def a_killed_gateway(trial: Trial) -> None:
    """The gateway is another process. A later one, which knows the session's id alone, ends the sandbox."""
    session_id, seconds = f"conformance-killed-{SECONDS}", f"{SECONDS}5"
    arguments = (HOLD, session_id, seconds, trial.spec.model_dump_json())
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = (sys.executable, "-m", "polar_gym.runtimes.conformance", *arguments)
    pipe = asyncio.subprocess.PIPE
    gone = await asyncio.create_subprocess_exec(*program, env=os.environ | paths, stdout=pipe)
    assert gone.stdout is not None
    try:
        same(await gone.stdout.readline(), b"up\n")
    finally:
        gone.kill()
        await gone.wait()
    same([await trial.runtime.reap([session_id]) for _ in range(2)], [1, 0])
    count = (sys.executable, "-c", RUNNING.replace(SECONDS, seconds))
    async with asyncio.timeout(END_SECONDS):
        while (await processes.run(count))[1] != b"0\n":  # noqa: ASYNC110 - processes end a moment after their kill
            await asyncio.sleep(0.1)


async def hold(session_id: str, seconds: str, spec: RuntimeSpec) -> None:
    """Be the gateway that is killed, once its sandbox runs a command and this has printed "up"."""
    async with Trial(RUNTIMES.make(spec), spec, Path()).sandbox(session_id) as box:
        await sh(box, "true")
        running = asyncio.create_task(sh(box, f"sleep {seconds}", timeout_seconds=LAW_SECONDS))
        await asyncio.wait({running}, timeout=1)
        sys.stdout.write("up\n")
        sys.stdout.flush()
        await running


LAWS: dict[str, Callable[[Trial], Awaitable[None]]] = {
    "environment, directory, input": environment_directory_input,
    "bytes are exact": exact_bytes,
    "long output keeps both ends": long_output,
    "exit codes": exit_codes,
    "a time limit ends all processes": time_limit,
    "nothing outlives its command": nothing_outlives_its_command,
    "a cancelled command ends": cancelling,
    "the workspace is a copy": workspace,
    "the diff is exact": exact_diff,
    "mounts are read-only": mounts,
    "reaches its gateway": its_own_gateway,
    "reaches nothing else": no_other_network,
    "graders have no gateway": no_gateway_for_graders,
    "network=none has none": network_none,
    "sandboxes are apart": sandboxes_are_apart,
    "no rights": no_rights,
    "memory is limited": a_memory_limit,
    "processes are limited": a_process_limit,
    "stop leaves nothing": stop_leaves_nothing,
    "nor does a killed gateway": a_killed_gateway,
}
