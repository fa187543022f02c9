"""The gateway's listening socket: in a sandbox's network namespace, or on the gateway's machine."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from pathlib import Path

from polar_gym.runtimes import SandboxError, Serve, processes
from polar_gym.runtimes.kernel import namespace

GATEWAY_SOCKET = "gw"
"""The name of the socket that `listen_at` makes; it is short, because a socket's path must be short."""


async def serve_on_host(serve: Serve) -> tuple[str, asyncio.Server]:
    """Serve the gateway on a free port of the machine's own loopback; return its address and the server.

    This is for a sandbox that shares the machine's network.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    return f"http://127.0.0.1:{listener.getsockname()[1]}", await serve(listener)


def listen_at(directory: Path) -> socket.socket:
    """Return a listening Unix socket in `directory`, open to every uid that can reach the directory."""
    path = directory / GATEWAY_SOCKET
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise SandboxError(
            f"the gateway's socket {path} could not be made ({error}); set runtime.scratch to a writable directory "
            "with a short name"
        ) from error
    path.chmod(0o666)
    listener.listen(128)
    return listener


async def listen_inside(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` in the network namespace of `pid`, and nowhere else.

    Raises `PermissionError` where neither root's way nor the owner's way is allowed, `FileNotFoundError` where the
    process is gone, and other errors as `OSError`.
    """
    try:
        return _from_thread(pid, port)
    except PermissionError:
        return await _from_child(pid, port)


def _from_thread(pid: int, port: int) -> socket.socket:
    """Make the socket root's way: a new thread joins the namespace and ends (well under a millisecond)."""
    outcome: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            outcome.append(namespace.listen_in(pid, port, join_owner=False))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="polar-gym-listener")
    thread.start()
    thread.join()
    match outcome:
        case [socket.socket() as listener]:
            return listener
        case [OSError() as error]:
            raise error
        case _:
            raise RuntimeError("the listener's thread ended without a result; its traceback is on stderr")


async def _from_child(pid: int, port: int) -> socket.socket:
    """Make the socket the owner's way: a single-threaded child joins the owning user namespace first, and passes the
    socket back."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            program = [sys.executable, "-I", "-S", str(Path(namespace.__file__))]
            child = await processes.start(
                [*program, str(pid), str(port), str(theirs.fileno())],
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        try:
            _, stderr = await child.communicate()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        if child.returncode != 0:
            reason = stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise PermissionError(f"no listener in the network namespace of process {pid}: {reason}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=descriptors[0])
