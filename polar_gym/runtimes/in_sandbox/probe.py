"""Tries what an attacker in this sandbox would try, and prints JSON: guarantee -> what was found against it.

The sandbox's own Python runs this program, from Python 3.9 on and with the standard library only. The argument is
JSON: the guarantees to check, and the machine's facts that the checks need. `polar_gym.runtimes.audit` judges.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import mmap
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ASKED = json.loads(sys.argv[1])
MARK: str = ASKED["mark"]
LIMITS: dict[str, int] = ASKED["limits"]
MIB = 1 << 20

HARMLESS = ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts")
OWN_SETTINGS = "/proc/sys/(fs/mqueue/|kernel/(auto_msgmni|msg|ns_last_pid|pid_max|sem|shm))"
"""Settings of the sandbox's own IPC and PID namespaces, which an agent may write where these belong to the agent."""
PROCESS_KEYRING, GET_PERSISTENT, SEARCH, SET_TIMEOUT = -2, 22, 10, 15

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def system_calls() -> list[str]:
    """Make each call with arguments that are no good. A call that is not refused complains about them."""
    good = {"chroot": [b"/"], "setns": [os.open("/proc/self/ns/net", os.O_RDONLY), 0]}
    calls = [(label, number, good.get(label, bad)) for label, number, bad in ASKED["calls"]]
    return [label for label, *call in calls if not _in_child(lambda call=call: _refused(*call))]


def _refused(number: int, arguments: list) -> bool:
    values = [each if isinstance(each, bytes) else ctypes.c_ulong(each) for each in arguments]
    failed = libc.syscall(ctypes.c_long(number), *values) < 0
    return failed and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS)


def _in_child(succeeds: Callable[[], bool]) -> bool:
    if not (child := os.fork()):
        try:
            signal.alarm(60)  # no check is meant to wait
            os._exit(0 if succeeds() else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def namespaces() -> list[str]:
    machines = ASKED["namespaces"].items()
    return [f"{kind} is the machine's" for kind, link in machines if os.readlink(f"/proc/self/ns/{kind}") == link]


def uid() -> list[str]:
    return [str(os.getuid()), " ".join(_content("/proc/self/uid_map").decode().split())]


def rights() -> list[str]:
    return re.findall("Cap(?:Eff|Prm|Inh|Amb):\t.*[1-9a-f].*|NoNewPrivs:\t0", _content("/proc/self/status").decode())


def leftovers() -> list[str]:
    """Leave a mark wherever that is possible, and return the places that have the mark of another sandbox."""
    numbers = {label: number for label, number, _ in ASKED["calls"]}
    call, keyctl, add_key = libc.syscall, numbers["keyctl"], numbers["add_key"]
    keyrings = {"session": -3, "user": -4, "persistent": call(keyctl, GET_PERSISTENT, -1, PROCESS_KEYRING)}
    found = []
    for name, keyring in keyrings.items():
        if call(keyctl, SEARCH, keyring, b"user", MARK.encode(), 0) > 0:
            found.append(f"in the {name} keyring")
        call(keyctl, SET_TIMEOUT, call(add_key, b"user", MARK.encode(), b"-", 1, keyring), 60)
    for directory in ASKED["places"]:
        if os.path.exists(path := os.path.join(directory, MARK)):
            found.append(f"in {directory}")
        with contextlib.suppress(OSError):
            open(path, "w").close()
    return found


def secrets() -> list[str]:
    """Look for the gateway's environment, and for what a sandbox must not read."""
    environments = [path for path in glob.glob("/proc/[0-9]*/environ") if MARK.encode() in _content(path)]
    return environments + [path for path in ("/etc/shadow", "/root", *ASKED["hidden"]) if _content(path)]


def _content(path: str) -> bytes:
    """Return the beginning of a file, or the names in a directory; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            return " ".join(os.listdir(path)).encode()
        with open(path, "rb") as file:
            return file.read(MIB)
    return b""


def devices() -> list[str]:
    others = [path for path in Path("/dev").rglob("*") if path.parts[2] not in HARMLESS and os.access(path, os.R_OK)]
    return [str(path) for path in others if path.is_char_device() or path.is_block_device()][:3]


def kernel_settings() -> list[str]:
    walks = (walk for top in ("/proc/sys", "/sys") for walk in os.walk(top))
    files = ["/proc/sysrq-trigger", *(os.path.join(parent, name) for parent, _, names in walks for name in names)]
    return [path for path in files if os.access(path, os.W_OK) and not re.match(OWN_SETTINGS, path)][:3]


def network() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # to connect it sends nothing
        return [f"a route to {each}" for each in ("192.0.2.1", "169.254.169.254") if not probe.connect_ex((each, 9))]


def memory() -> list[str]:
    """Take shared memory, which counts for all processes together, and then the memory of one process."""
    much = LIMITS["memory_mb"] * 3 // 2
    shared = mmap.mmap(-1, much * MIB)
    if not _in_child(lambda: all(shared.write(bytes(MIB)) for _ in range(much))):
        return []
    return ["no limit"] if _in_child(lambda: bool(bytearray(b"x") * (much * MIB))) else ["each process alone"]


def processes() -> list[str]:
    threading.stack_size(1 << 16)  # of the usual size, their memory would reach its limit first
    threads = [threading.Thread(target=signal.pause) for _ in range(2 * LIMITS["pids"])]
    return ["no limit"] if _in_child(lambda: [each.start() for each in threads] != []) else []


def disk() -> list[str]:
    limit = LIMITS["disk_mb"] * MIB
    if all(room.f_blocks * room.f_frsize <= limit for room in map(os.statvfs, ("/tmp", os.path.expanduser("~")))):
        return []
    return ["each file alone"] if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[1] <= limit else ["no limit"]


def shared_memory() -> list[str]:
    multiprocessing.Lock()  # a file in /dev/shm
    return []


def answer(guarantee: str) -> list[str]:
    try:
        return globals()[guarantee.replace(" ", "_")]()
    except (ImportError, OSError) as error:  # the other answers must not be lost
        return [f"{type(error).__name__}: {error}"]


json.dump({guarantee: answer(guarantee) for guarantee in ASKED["guarantees"]}, sys.stdout)
