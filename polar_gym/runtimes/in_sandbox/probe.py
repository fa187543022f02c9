"""Tries what an attacker in this sandbox would try, and prints JSON: guarantee -> answer (`polar_gym.runtimes.audit`).

The sandbox's own Python runs this program, from Python 3.9 on and with the standard library only. The argument is
JSON: the guarantees to check, and the machine's facts that the checks need. An answer is a list of three: what breaks
the guarantee, what weakens the guarantee, and the words for an unbroken one.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable

ASKED = json.loads(sys.argv[1])
MARK: str = ASKED["mark"]
LIMITS: dict[str, int] = ASKED["limits"]
MIB = 1 << 20

MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug"),
    *("/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware"),
)
"""What Docker hides of the machine, besides the machine's memory (/proc/kcore)."""
HARMLESS = ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts")
PROCESS_KEYRING, GET_PERSISTENT, SEARCH, SET_TIMEOUT = -2, 22, 10, 15
SEIZE = 0x4206
OWN_SETTINGS = (
    *("/proc/sys/fs/mqueue/", "/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/msg", "/proc/sys/kernel/ns_last_pid"),
    *("/proc/sys/kernel/pid_max", "/proc/sys/kernel/sem", "/proc/sys/kernel/shm"),
)
"""Settings of the sandbox's own IPC and PID namespaces, which an agent may write where these belong to the agent."""

Answer = tuple[list[str], list[str], str]

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def system_calls() -> Answer:
    """Make each call with arguments that are no good. A call that is not refused complains about them."""
    good = {"chroot": [b"/"], "setns": [os.open("/proc/self/ns/net", os.O_RDONLY), 0]}
    calls = [(label, number, good.get(label, bad)) for label, number, bad in ASKED["calls"]]
    reached = [label for label, *call in calls if not _in_child(lambda call=call: _refused(*call))]
    return reached, [], f"{len(calls)} are refused"


def _refused(number: int, arguments: list) -> bool:
    values = [each if isinstance(each, bytes) else ctypes.c_ulong(each) for each in arguments]
    failed = libc.syscall(ctypes.c_long(number), *values) < 0
    return failed and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS)


def _in_child(succeeds: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # no check is meant to wait
            os._exit(0 if succeeds() else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def namespaces() -> Answer:
    shared = [kind for kind, link in ASKED["namespaces"].items() if os.readlink(f"/proc/self/ns/{kind}") == link]
    lacking = [f"{kind} is the machine's" for kind in ("ipc", "mnt", "net", "pid", "uts") if kind in shared]
    return lacking, [], f"shared with the machine: {', '.join(sorted(shared)) or 'none'}"


def rights() -> Answer:
    status = _status("self")
    held = [f"{name} {status[name]}" for name in ("CapEff", "CapPrm", "CapInh", "CapAmb") if int(status[name], 16)]
    if status["NoNewPrivs"] != "1":
        held.append("setuid programs work")
    return held, [], f"none, and no way to any; bounding set {int(status['CapBnd'], 16):#x}"


def _status(process: str) -> dict[str, str]:
    with open(f"/proc/{process}/status") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def other_processes() -> Answer:
    """Try to take over the processes that are seen: one without a filter could make any system call."""
    others = [each for each in os.listdir("/proc") if each.isdigit() and int(each) != os.getpid()]
    seized = [_status(each) for each in others if libc.ptrace(SEIZE, int(each), None, None) == 0]
    free = [f"{each['Name']} can be taken over, and has no filter" for each in seized if each["Seccomp"] != "2"]
    return free, [], f"seen: {len(others)}"


def leftovers() -> Answer:
    """Leave a mark wherever that is possible, and return the places that have the mark of another sandbox."""
    call, (keyctl, add_key) = libc.syscall, (ASKED["numbers"][name] for name in ("keyctl", "add_key"))
    keyrings = {"session": -3, "user": -4, "persistent": call(keyctl, GET_PERSISTENT, -1, PROCESS_KEYRING)}
    found = []
    for name, keyring in keyrings.items():
        if call(keyctl, SEARCH, keyring, b"user", MARK.encode(), 0) > 0:
            found.append(f"in the {name} keyring")
        call(keyctl, SET_TIMEOUT, call(add_key, b"user", MARK.encode(), b"-", 1, keyring), 60)
    for directory in (*ASKED["writable"], *ASKED["system"], "/dev/shm", "/dev/mqueue", "/run/lock", "/var/tmp"):
        path = os.path.join(directory, MARK)
        if os.path.exists(path):
            found.append(f"in {directory}")
        elif os.access(directory, os.W_OK):
            open(path, "w").close()
    return found, [], "none of other sandboxes"


def system_files() -> Answer:
    writable = [path for path in ASKED["system"] if os.access(path, os.W_OK)]
    return [], [f"{', '.join(writable)} writable"] if writable else [], "read-only"


def machine_secrets() -> Answer:
    """Look for the gateway's environment, and for a file that every user of the machine may read."""
    processes = glob.glob("/proc/[0-9]*")
    seen = [f"{each}/environ" for each in processes if ASKED["secret"].encode() in _content(f"{each}/environ")]
    files = [root + ASKED["file"] for root in ("", *(f"{each}/root" for each in processes))]
    seen += [path for path in (*files, "/var/run/docker.sock") if os.access(path, os.R_OK)]
    return seen + [path for path in ("/etc/shadow", "/root") if _content(path)], [], "not seen"


def kernel_secrets() -> Answer:
    return ["/proc/kcore"] if _content("/proc/kcore") else [], [path for path in MASKED if _content(path)], "hidden"


def _content(path: str) -> bytes:
    """Return the beginning of a file, or the names in a directory; nothing where it cannot be read."""
    try:
        if os.path.isdir(path):
            return " ".join(os.listdir(path)).encode()
        with open(path, "rb") as file:
            return file.read(MIB)
    except OSError:
        return b""


def devices() -> Answer:
    paths = [os.path.join(parent, name) for parent, _, names in os.walk("/dev") for name in names]
    special = [path for path in paths if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK)]
    others = [path for path in special if path.split("/")[2] not in HARMLESS]
    return [path for path in others if os.access(path, os.R_OK)][:3], [], f"{len(special)}, all harmless"


def kernel_settings() -> Answer:
    walks = (walk for top in ("/proc/sys", "/sys") for walk in os.walk(top))
    files = ["/proc/sysrq-trigger", *(os.path.join(parent, name) for parent, _, names in walks for name in names)]
    writable = [path for path in files if not path.startswith(OWN_SETTINGS) and os.access(path, os.W_OK)]
    return writable[:3], [], f"{len(files)} files, none writable"


def network() -> Answer:
    reached = [f"{target} answers" for target in ASKED["targets"] if _connects(target)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # to connect it sends nothing
        reached += ["a route to other machines"] if probe.connect_ex(("192.0.2.1", 9)) == 0 else []
    return reached + ([] if _connects(ASKED["gateway"]) else ["no gateway"]), [], "the gateway, nothing else"


def _connects(target: str | list) -> bool:
    local = isinstance(target, str)
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as probe:
        probe.settimeout(3)
        return probe.connect_ex(target if local else tuple(target)) == 0


def memory() -> Answer:
    """Take shared memory, which counts for all processes together, and then the memory of one process."""
    much = LIMITS["memory_mb"] * 3 // 2
    shared = mmap.mmap(-1, much * MIB)
    if not _in_child(lambda: all(shared.write(bytes(MIB)) for _ in range(much))):
        return [], [], f"{LIMITS['memory_mb']} MiB as asked"
    unlimited = _in_child(lambda: bool(bytearray(b"x") * (much * MIB)))
    return (["no limit"], [], "") if unlimited else ([], ["each process alone"], "")


def processes() -> Answer:
    limit, children = LIMITS["pids"], []
    try:
        while len(children) < 2 * limit:
            children.append(os.fork())
            if children[-1] == 0:
                signal.pause()
    except OSError:
        return [], [], f"{limit} as asked"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ["no limit"], [], ""


def disk() -> Answer:
    limit = LIMITS["disk_mb"]
    if _written(16, limit // 8) <= limit:
        return [], [], f"{limit} MiB as asked"
    return ([], ["each file alone"], "") if _written(1, 2 * limit) == 0 else (["no limit"], [], "")


def _written(files: int, mebibytes: int) -> int:
    """Return how many MiB fit into so many files of a size."""
    paths = [os.path.join(directory, f"{MARK}-{each}") for each in range(files) for directory in ASKED["writable"]]
    made = []
    try:
        for path in paths[:files]:
            with open(path, "wb") as file:
                made.append(path)
                os.posix_fallocate(file.fileno(), 0, mebibytes * MIB)
    except OSError:
        return (len(made) - 1) * mebibytes
    finally:
        for path in made:
            os.unlink(path)
    return files * mebibytes


def core_dumps() -> Answer:
    allowed = resource.getrlimit(resource.RLIMIT_CORE)[1] != 0
    return [], ["the machine's handler gets them"] if allowed else [], "none"


def shared_memory() -> Answer:
    multiprocessing.Lock()  # a file in /dev/shm
    room = os.statvfs("/dev/shm")
    return [], [], f"multiprocessing works; {room.f_blocks * room.f_frsize // MIB} MiB"


def answer(guarantee: str) -> Answer:
    try:
        return globals()[guarantee.replace(" ", "_")]()
    except (ImportError, OSError) as error:  # the other answers must not be lost
        return [f"{type(error).__name__}: {error}"], [], ""


json.dump({guarantee: answer(guarantee) for guarantee in ASKED["guarantees"]}, sys.stdout)
