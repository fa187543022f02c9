"""Which system calls a sandbox may make: in bubblewrap and Apptainer those that it may make in Docker."""

from __future__ import annotations

import json
import platform
import re
import uuid
from pathlib import Path

import pytest

from polar_gym.runtimes import Command
from polar_gym.runtimes.apptainer.seccomp import ENTERING
from polar_gym.runtimes.docker import sandbox as docker_sandbox
from polar_gym.runtimes.kernel import seccomp
from polar_gym.runtimes.kernel.syscalls import LAST, NAMESPACES
from tests.lifecycle.gateway_users import Gateway, directory, gateway
from tests.lifecycle.runtime_kinds import make, started
from tests.support import apptainer
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_bubblewrap
from tests.support.system_calls import numbers

__all__ = ["directory", "docker_host", "gateway"]

PROBE = Path(__file__).with_name("system_call_probe.py").read_text()
HIGHEST = 600
"""Well above the numbers that Linux has given out."""

SKIPPED = {
    "pause": "waits for a signal",
    "rt_sigreturn": "takes its frame from the stack, where the probe has none",
    "sync": "writes to all disks of the machine",
    "vfork": "borrows the memory of the interpreter",
}

DENIED_BEYOND_DOCKER = {
    "io_uring_setup": "EPERM",
    "io_uring_enter": "EPERM",
    "io_uring_register": "EPERM",
    "set_mempolicy_home_node": "EPERM",
    "socket(AF_ALG)": "EPERM",
    "socket(AF_VSOCK)": "EPERM",
    "socket(AF_VSOCK, upper bits set)": "EPERM",
    "keyctl of x32": "ENOSYS",
    "getpid of i386": "ENOSYS",
}
"""Our answers where Docker may give another one. Older profiles of Docker allow io_uring and the sockets, and
do not know `set_mempolicy_home_node`. Docker compares 64 bits of a socket's family, of which the kernel takes 32; and
it has rules for 32-bit programs, for which we have none."""

DENIED_BY_OLDER_DOCKERS = {
    *("name_to_handle_at", "pkey_alloc", "pkey_free", "pkey_mprotect", "process_vm_readv", "process_vm_writev"),
}
"""Docker allows these now: they do no more than `openat`, `mprotect` and `ptrace`, which it always has."""

Call = tuple[str, int, list[int]]
"""Label, number, arguments: what the probe takes."""


def labels() -> dict[int, str]:
    """The name of every number, where this machine's headers have one."""
    names = {number: name for name, number in numbers(platform.machine()).items()}
    return {number: names.get(number, f"number {number}") for number in range(HIGHEST)}


def later_calls() -> list[str]:
    """Calls that the filter answers as an older kernel would, and that a newer Docker allows."""
    return [label for number, label in labels().items() if number > LAST]


def calls() -> list[Call]:
    """Every number with arguments that are no good, and those calls whose arguments decide."""
    number = numbers(platform.machine())
    nonsense = [2**64 - 1] * 6
    found = [(label, value, nonsense) for value, label in labels().items() if label not in SKIPPED]
    bits = [1 << bit for bit in range(32) if NAMESPACES >> bit & 1]
    found += [(f"clone({flag:#x})", number["clone"], [flag, 0, 0, 0, 0]) for flag in (17, *bits)]
    found += [(f"unshare({flag:#x})", number["unshare"], [flag]) for flag in (0, *bits)]
    personalities = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF, 0x40000, 0x1_0000_0008)
    found += [(f"personality({value:#x})", number["personality"], [value]) for value in personalities]
    families = {"AF_UNIX": 1, "AF_INET": 2, "AF_NETLINK": 16, "AF_ALG": 38, "AF_NFC": 39, "AF_VSOCK": 40, "AF_KCM": 41}
    families |= {"AF_VSOCK, upper bits set": 1 << 32 | 40, "AF_UNIX, upper bits set": 1 << 32 | 1}
    found += [(f"socket({name})", number["socket"], [family, 1, 0]) for name, family in families.items()]
    if platform.machine() == "x86_64":
        found += [(f"{name} of x32", 1 << 30 | number[name], nonsense) for name in ("getpid", "keyctl")]
        found.append(("getpid of i386", -1, [0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, 20; int 0x80; ret
    return found


async def test_calls_that_docker_denies_are_denied(docker_host: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """Errno for errno, as Docker's default profile answers: there was no filter."""
    monkeypatch.setattr(docker_sandbox, "SECURITY", ("no-new-privileges",))
    probing = argv, stdin = ("python3", "-c", PROBE), json.dumps(calls())
    runtime = make("docker", host=docker_host)
    async with started(runtime) as sandbox:
        result = await sandbox.exec(Command(argv=argv, stdin=stdin.encode()))
    await runtime.close()
    assert result.exit_code == 0, result.stderr
    docker = json.loads(result.stdout)
    answers = json.loads((await gateway.outputs(probing))[0])
    beyond = DENIED_BEYOND_DOCKER | dict.fromkeys(later_calls(), "ENOSYS")
    assert {label: answer for label, answer in answers.items() if beyond.get(label, answer) != answer} == {}
    differences = {label: (docker[label], answer) for label, answer in answers.items() if docker[label] != answer}
    left_to_the_kernel = ENTERING if gateway.kind == "apptainer" else ()
    unexpected = differences.keys() - beyond.keys() - DENIED_BY_OLDER_DOCKERS - {*left_to_the_kernel}
    assert {label: differences[label] for label in unexpected} == {}
    assert {docker[label] for label in differences.keys() & DENIED_BY_OLDER_DOCKERS} <= {"EPERM"}


ENTER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for made in (libc.chroot(b"/"), libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0)):
    print(made, os.strerror(ctypes.get_errno()))
"""


async def test_no_other_root_and_no_other_namespace_can_be_entered(gateway: Gateway):
    """Apptainer's filter allows both calls, for `nsenter` makes them under it."""
    assert await gateway.outputs((("python3", "-c", ENTER), "")) == ["-1 Operation not permitted\n" * 2]


KEYS = """
import ctypes, json, os, sys
call = ctypes.CDLL(None).syscall
add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
GET_PERSISTENT, SEARCH, PROCESS_KEYRING = 22, 10, -2
keyrings = {"session": -3, "user": -4, "persistent": call(keyctl, GET_PERSISTENT, -1, PROCESS_KEYRING)}
does, name = sys.argv[1], sys.argv[2].encode()
for keyring in keyrings.values():
    if does == "hide":
        call(add_key, b"user", name, b"hidden tests", 12, keyring)
print(json.dumps([key for key, keyring in keyrings.items() if call(keyctl, SEARCH, keyring, b"user", name, 0) > 0]))
"""
"""Prints the names of the keyrings in which the key is."""


async def test_no_keyring_takes_a_secret_to_a_later_sandbox(gateway: Gateway):
    """The kernel keeps the keys of a user for days: code under test hid the tests there for the sessions to come."""
    name = uuid.uuid4().hex
    hide, seek = ((("python3", "-c", KEYS, does, name), "") for does in ("hide", "seek"))
    hidden, found_by_next_session = await gateway.outputs(hide, seek)
    (found_by_next_gateway,) = await gateway.outputs(seek)
    assert (hidden, found_by_next_session, found_by_next_gateway) == ("[]\n", "[]\n", "[]\n")


SEIZE = """
import ctypes, json
from pathlib import Path
SEIZE = 0x4206
others = [each for each in Path("/proc").glob("[0-9]*") if ctypes.CDLL(None).ptrace(SEIZE, int(each.name), 0, 0) == 0]
free = [(each / "comm").read_text() for each in others if "Seccomp:\\t2" not in (each / "status").read_text()]
print(json.dumps(free))
"""
"""Prints the processes that it may take over and that have no filter."""


async def test_a_process_that_can_be_taken_over_has_the_filter_too(gateway: Gateway):
    """Without root the sandbox's PID 1 has the agent's uid: the agent could make calls through it."""
    assert await gateway.outputs((("python3", "-c", SEIZE), "")) == ["[]\n"]


def no_kernel_takes(machine: str, allowed: tuple[str, ...] = ()) -> bytes:
    return bytes(8)


def test_a_kernel_that_takes_no_filter_is_named(monkeypatch: pytest.MonkeyPatch):
    """Without a filter in its trial, `doctor` would find all well."""
    need_bubblewrap()
    runtime = make("bubblewrap")
    need(not runtime.check(), "bubblewrap", str(runtime.check()))
    monkeypatch.setattr(seccomp, "program", no_kernel_takes)
    (message,) = runtime.check()
    assert re.search(
        r"takes no system call filter \(bwrap: .*SECCOMP.*\).*CONFIG_SECCOMP_FILTER.*runtime=docker", message
    )
    (message,) = make("apptainer", program=apptainer.program()).check()
    assert re.search(r"cannot be filtered here \(Invalid argument\).*CONFIG_SECCOMP_FILTER.*runtime=docker", message)


def test_a_machine_without_a_filter_is_named(monkeypatch: pytest.MonkeyPatch):
    need_bubblewrap()
    runtimes = make("bubblewrap"), make("apptainer", program=apptainer.program())
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    for runtime in runtimes:
        (message,) = runtime.check()
        assert "no system call filter for riscv64" in message
