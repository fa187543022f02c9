"""A provider of sandboxes that follows NeMo Gym's protocol (0.7) to the letter, with real processes.

Each sandbox is a bubblewrap that lasts, half an hour at most. Records are the provider's own: it imports nothing of
polar-gym.

It is installed as a package of its own would be, by an entry point (`installed`), under three names: `boxes` gives
sessions with pipes and storage that its sandboxes share, `routed` a route for HTTP through a proxy, and `streamless` no
stream. Needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
ETC = {"passwd": "root:x:0:0:root:/root:/bin/sh\n", "group": "root:x:0:\n", "hosts": "127.0.0.1 localhost\n"}
MACHINES = ("alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf", "python3")
SENTINEL = 125


class SandboxStatus(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"


@dataclasses.dataclass
class SandboxHandle:
    sandbox_id: str
    provider_name: str
    raw: Any


@dataclasses.dataclass(frozen=True)
class SandboxExecResult:
    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None


class SandboxPtyError(RuntimeError):
    pass


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a command, and the `nsenter` that waits for it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


class Session:
    """A session in pipe mode."""

    def __init__(self, process: asyncio.subprocess.Process, cut_after: float) -> None:
        """The connection is lost in the midst of the bytes after so many."""
        self.cut_after = cut_after
        self.session_id = str(process.pid)
        self.mode = "pipe"
        self.process = process
        self.closed = False

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        assert self.process.stdout is not None
        data = await asyncio.wait_for(self.process.stdout.read(65536), timeout_s)
        if not data and await self.process.wait() < 0:
            raise SandboxPtyError("the session died")
        return data

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        assert self.process.stderr is not None
        return await asyncio.wait_for(self.process.stderr.read(65536), timeout_s)

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.cut_after -= len(data)
        if self.cut_after < 0:
            self.process.stdin.write(data[: int(self.cut_after)])
            await asyncio.wait({asyncio.ensure_future(self.process.stdin.drain())}, timeout=1)
            await self.cut()
            raise SandboxPtyError("the connection was lost")
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except OSError as error:
            raise SandboxPtyError(str(error)) from error

    async def close(self) -> None:
        self.closed = True
        await self.cut()
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def cut(self) -> None:
        """Lose the connection, as a network does."""
        await end(self.process)


class Streamless:
    """What the protocol asks of every provider, and no more."""

    name = "streamless"
    made: list[Streamless] = []  # noqa: RUF012 - tests look for the provider that the runtime made

    def __init__(self, *, refuse: str = "") -> None:
        self.refuse = refuse
        self.specs: list[Any] = []
        self.alive: dict[str, SandboxHandle] = {}
        self.sent: list[tuple[str, int]] = []
        """Path and size of each file that was sent."""
        self.made.append(self)

    async def create(self, spec: Any) -> SandboxHandle:
        if self.refuse:
            raise RuntimeError(self.refuse)
        self.specs.append(spec)
        reading, writing = os.pipe()
        root = [part for link in ("bin", "sbin", "lib", "lib64") for part in ("--symlink", f"usr/{link}", f"/{link}")]
        root += [
            part
            for directory in ("/etc", "/etc/ssl", "/root", "/opt", "/opt/polar-gym")
            for part in ("--perms", "0755", "--dir", directory)
        ]
        machine = [part for name in MACHINES for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
        volumes = [part for each in spec.provider_options.get("volumes", ()) for part in self.mounted(each)]
        view = [
            "--ro-bind",
            "/usr",
            "/usr",
            *root,
            *machine,
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
            *volumes,
        ]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", *SPACES, "--info-fd", str(writing), *view),
            *("sh", "-c", f"chmod 1777 /tmp; echo up; sleep {min(spec.ttl_s, 1800)}; kill -9 -1"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[writing],
        )
        os.close(writing)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        pid = json.loads(os.read(reading, 4096))["child-pid"]
        os.close(reading)
        for name, text in ETC.items():
            Path(f"/proc/{pid}/root/etc/{name}").write_text(text)
        handle = SandboxHandle(f"box-{pid}", self.name, (process, pid, spec.resources.memory_mib))
        self.alive[handle.sandbox_id] = handle
        return handle

    def mounted(self, volume: Any) -> list[str]:
        raise ValueError("no volumes here")

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        assert user in (None, "root", 0)
        process = await self.enter(handle, f"cd {cwd or '/'} && {command}", env or {}, stdin=asyncio.subprocess.DEVNULL)
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_s or 180)
        except TimeoutError:
            await end(process)
            return SandboxExecResult(None, "timed out", SENTINEL, "timeout")
        assert process.returncode is not None
        return SandboxExecResult(stdout.decode(errors="replace"), stderr.decode(errors="replace"), process.returncode)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        target = Path(f"/proc/{handle.raw[1]}/root{target_path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.sent.append((target_path, source_path.stat().st_size))
        await asyncio.to_thread(shutil.copyfile, source_path, target)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        await asyncio.to_thread(shutil.copyfile, f"/proc/{handle.raw[1]}/root{source_path}", target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        return SandboxStatus.RUNNING if handle.raw[0].returncode is None else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        process, pid, _ = handle.raw
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await process.communicate()
        self.alive.pop(handle.sandbox_id, None)

    async def aclose(self) -> None:
        return None

    async def enter(
        self, handle: SandboxHandle, command: str, env: dict[str, str], **pipes: Any
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(
                "prlimit",
                f"--data={handle.raw[2] << 20}",
                "nsenter",
                "--target",
                str(handle.raw[1]),
                "--all",
                "--",
                "sh",
                "-c",
                command,
            ),
            env={"PATH": PATH, "FROM_IMAGE": "yes", **env},
            start_new_session=True,
            **{"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE, **pipes},
        )


class Boxes(Streamless):
    """The same, with sessions and storage."""

    name = "boxes"

    def __init__(self, *, cut_after: float = math.inf, storage: str | None = None, **config: Any) -> None:
        """`cut_after`: the bytes that are written to each session before its connection is lost. `storage`: the
        directory that sandboxes share."""
        super().__init__(**config)
        self.cut_after = cut_after
        self.storage = storage
        self.sessions: list[Session] = []

    async def create_pty(self, handle: SandboxHandle, spec: Any) -> Session:
        assert spec.pty is False
        assert spec.user in (None, "root")
        if handle.sandbox_id not in self.alive:
            raise SandboxPtyError(f"{handle.sandbox_id} is gone")
        process = await self.enter(handle, spec.command, spec.env or {}, stdin=asyncio.subprocess.PIPE)
        self.sessions.append(Session(process, self.cut_after))
        return self.sessions[-1]

    def shared_volume_metadata(self) -> dict[str, str]:
        if self.storage is None:
            raise NotImplementedError("no storage is configured")
        return {"placed": "here"}

    def shared_volume_options(self, source: str | None, target: str, *, read_only: bool = False) -> dict[str, Any]:
        self.shared_volume_metadata()
        return {"volumes": [{"source": source or ".", "target": target, "read_only": read_only}]}

    def mounted(self, volume: Any) -> list[str]:
        assert self.storage is not None
        kind = "--ro-bind" if volume["read_only"] else "--bind"
        return [kind, str(Path(self.storage, volume["source"])), volume["target"]]

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        return {"pid": handle.raw[1]}

    async def connect(self, descriptor: Any) -> SandboxHandle:
        return SandboxHandle(f"box-{descriptor['pid']}", self.name, (_Gone(), descriptor["pid"], 8192))


class _Gone:
    """The process of a sandbox that another gateway started."""

    returncode = None

    async def communicate(self) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class SandboxEndpoint:
    endpoint: str
    headers: dict[str, str]


class Routed(Streamless):
    """No sessions, but a route for HTTP: a proxy that asks for a key, and knows a sandbox's port by its path."""

    name = "routed"
    key = "the-account's"

    def __init__(self, *, cut_after: float = math.inf, **config: Any) -> None:
        """`cut_after`: the bytes that are passed on to a sandbox before the connection is lost."""
        super().__init__(**config)
        self.cut_after = cut_after
        self.lost = 0
        self.proxy: asyncio.Server | None = None

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        assert self.specs[-1].ports == (port,)
        if self.proxy is None:
            self.proxy = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        address, own_port = self.proxy.sockets[0].getsockname()
        return SandboxEndpoint(f"http://{address}:{own_port}/{handle.raw[1]}/{port}/", {"Key": self.key})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked = re.match(rb"GET /(\d+)/(\d+)/ ", head)
        if asked is None or f"\r\nKey: {self.key}\r\n".encode() not in head:
            writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        try:
            there = await asyncio.to_thread(dial, *map(int, asked.groups()))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_connection(sock=there)
        inner_writer.write(head.replace(asked[0], b"GET / ", 1))
        both = (pass_on(reader, inner_writer, self.cut_after), pass_on(inner_reader, writer, math.inf))
        for passed in asyncio.as_completed(both):
            self.lost += not await passed
            for each in (writer, inner_writer):
                each.transport.abort()

    async def aclose(self) -> None:
        if self.proxy is not None:
            self.proxy.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float) -> bool:
    """Pass bytes on until their end; return False where the limit came first."""
    try:
        while data := await reader.read(65536):
            writer.write(data[: int(min(limit, len(data)))])
            limit -= len(data)
            if limit < 0:
                return False
            await writer.drain()
    except OSError:
        pass
    return True


def dial(pid: int, port: int) -> socket.socket:
    """Return a connection to a port in the network of a sandbox. Raises `OSError`."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with Path("/proc/thread-self/ns/net").open() as own, Path(f"/proc/{pid}/ns/net").open() as other:
        setns(other.fileno(), 0)
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        finally:
            setns(own.fileno(), 0)


@contextlib.contextmanager
def installed(directory: Path) -> Iterator[None]:
    """Have this process see a package that offers the providers."""
    metadata = directory / "boxes-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: boxes\nVersion: 1.0\n")
    lines = [f"{each.name} = {__name__}:{each.__name__}" for each in (Boxes, Routed, Streamless)]
    (metadata / "entry_points.txt").write_text("\n".join(["[nemo_gym.sandbox_providers]", *lines, ""]))
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
