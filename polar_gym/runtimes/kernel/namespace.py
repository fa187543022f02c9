"""A listening socket inside another process's network namespace.

A socket always belongs to the namespace in which it was made. A thread can join the sandbox's namespace, bind and
listen, and leave again: the socket is still reachable from inside that sandbox only, while the gateway's own event loop
serves it. This module uses only system calls and the standard library, because it is also run as a program. Without
root, a process may join a namespace only after the user namespace that owns it, and Linux allows that only to
single-threaded processes. The program hands its socket back over a Unix socket.

    python namespace.py PID PORT CHANNEL_FD
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000
NS_GET_USERNS = 0xB701
IP_FREEBIND = 15

_libc = ctypes.CDLL(None, use_errno=True)


def join(namespace: int, kind: int) -> None:
    """Move the calling thread into the namespace behind this file descriptor."""
    if _libc.setns(namespace, kind) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def listen_in(pid: int, port: int, *, join_owner: bool) -> socket.socket:
    """Join the network namespace of `pid`, and return a socket that listens on its 127.0.0.1.

    `join_owner`: join the user namespace that owns it first. The calling thread stays in the namespace, so call this in
    a thread or a process that ends.
    """
    path = Path(f"/proc/{pid}/ns/net")
    if path.samefile("/proc/self/ns/net"):
        raise PermissionError(f"process {pid} has no network namespace of its own")
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if join_owner:
            owner = fcntl.ioctl(namespace, NS_GET_USERNS)
            join(owner, CLONE_NEWUSER)
            os.close(owner)
        join(namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The sandbox may not have its loopback up yet; its command starts only after that.
    listener.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def main() -> None:
    pid, port, channel = map(int, sys.argv[1:])
    with socket.socket(fileno=channel) as parent, listen_in(pid, port, join_owner=True) as listener:
        socket.send_fds(parent, [b"\0"], [listener.fileno()])


if __name__ == "__main__":
    main()
