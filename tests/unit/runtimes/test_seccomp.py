"""The filter of system calls, run by an interpreter of classic BPF as the kernel would run it."""

from __future__ import annotations

import errno
import struct
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.kernel import seccomp
from polar_gym.runtimes.kernel.syscalls import DENIED, LAST, MACHINES
from tests.support.system_calls import numbers

AUDIT_ARCH_I386, AUDIT_ARCH_ARM = 0x40000003, 0x40000028
X32 = 0x40000000
"""Set in the number of a call by x86-64's 32-bit programs."""

ALLOWED = "allowed"
EPERM, ENOSYS = "EPERM", "ENOSYS"

machines = pytest.mark.parametrize("machine", sorted(MACHINES))


@cache
def instructions(machine: str, allowed: tuple[str, ...] = ()) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", seccomp.program(machine, allowed)))


def answer(
    machine: str, number: int, argument: int = 0, *, audit: int | None = None, allowed: tuple[str, ...] = ()
) -> str:
    """What the filter says to a call with this first argument."""
    program = instructions(machine, allowed)
    audit = MACHINES[machine].audit if audit is None else audit
    call = struct.pack("<IIQQ", number, audit, 0, argument)
    accumulator, at = 0, 0
    while True:
        code, met, unmet, operand = program[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", call, operand)
            case 0x15:
                at += met if accumulator == operand else unmet
            case 0x25:
                at += met if accumulator > operand else unmet
            case 0x35:
                at += met if accumulator >= operand else unmet
            case 0x45:
                at += met if accumulator & operand else unmet
            case 0x06:
                return _verdict(operand)
            case _:
                raise AssertionError(f"instruction {code:#x} is not one of the filter's")


def _verdict(operand: int) -> str:
    if operand == 0x7FFF0000:
        return ALLOWED
    assert operand >> 16 == 5, f"{operand:#x} is neither SECCOMP_RET_ALLOW nor SECCOMP_RET_ERRNO"
    return errno.errorcode[operand & 0xFFFF]


@machines
def test_the_kernel_would_take_the_program(machine: str):
    program = instructions(machine)
    assert len(program) <= 4096
    for at, (code, met, unmet, _) in enumerate(program):
        assert code in (0x06, 0x15, 0x20, 0x25, 0x35, 0x45)
        assert code == 0x06 or at + 1 + max(met, unmet) < len(program), "it can run over its end"


@machines
def test_every_call_is_answered_by_its_name(machine: str):
    """A wrong number in the table would deny an innocent call, and leave the other one open."""
    names = {number: name for name, number in numbers(machine).items()}
    column = ("x86_64", "aarch64").index(machine)
    assert {name for name, both in DENIED.items() if both[column] is None} == DENIED.keys() - set(names.values())
    for number in range(2 * LAST):
        name = names.get(number)
        expected = EPERM if name is None or name in DENIED else ALLOWED
        if number > LAST or name == "clone3":
            expected = ENOSYS
        assert answer(machine, number) == expected, (number, name)


@machines
def test_calls_can_be_allowed_by_name(machine: str):
    for name, number in numbers(machine).items():
        also = ALLOWED if name in ("chroot", "setns") else answer(machine, number)
        assert answer(machine, number, allowed=("chroot", "setns")) == also


@machines
@given(number=st.integers(LAST + 1, 2**32 - 1), argument=st.integers(0, 2**64 - 1))
def test_a_number_that_linux_has_yet_to_use_is_refused(machine: str, number: int, argument: int):
    assert answer(machine, number, argument) == ENOSYS


@pytest.mark.parametrize(
    ("machine", "audit"),
    [
        ("x86_64", AUDIT_ARCH_I386),
        ("x86_64", MACHINES["aarch64"].audit),
        ("aarch64", AUDIT_ARCH_ARM),
        ("aarch64", MACHINES["x86_64"].audit),
    ],
)
def test_programs_of_another_machine_make_no_call(machine: str, audit: int):
    """i386's `keyctl` has the number of x86-64's `accept4`: a filter that looks at numbers alone lets it pass."""
    assert {answer(machine, number, audit=audit) for number in range(2 * LAST)} == {ENOSYS}


def test_x32_programs_make_no_call():
    assert {answer("x86_64", X32 | number) for number in range(2 * LAST)} == {ENOSYS}


NEW_NAMESPACES = {
    "CLONE_NEWNS": 0x00020000,
    "CLONE_NEWCGROUP": 0x02000000,
    "CLONE_NEWUTS": 0x04000000,
    "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWUSER": 0x10000000,
    "CLONE_NEWPID": 0x20000000,
    "CLONE_NEWNET": 0x40000000,
}
THREAD = 0x3D0F00
"""The flags that glibc starts a thread with."""


@machines
@given(other=st.integers(0, 2**64 - 1))
def test_clone_makes_no_namespace(machine: str, other: int):
    clone = numbers(machine)["clone"]
    for flag in NEW_NAMESPACES.values():
        assert answer(machine, clone, other | flag) == EPERM
    assert answer(machine, clone, other & ~sum(NEW_NAMESPACES.values())) == ALLOWED
    assert answer(machine, clone, THREAD) == ALLOWED


KNOWN_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


@machines
@given(value=st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 2**20)))
def test_personality_is_linuxs_own(machine: str, value: int):
    personality = numbers(machine)["personality"]
    assert {answer(machine, personality, known) for known in KNOWN_PERSONALITIES} == {ALLOWED}
    assert {answer(machine, personality, known | 1 << 32) for known in KNOWN_PERSONALITIES} == {EPERM}
    assert (answer(machine, personality, value) == ALLOWED) == (value in KNOWN_PERSONALITIES)


@machines
@given(high=st.integers(0, 2**32 - 1))
def test_a_socket_is_of_a_family_that_stays_in_the_sandbox(machine: str, high: int):
    """The kernel reads the lower half of the argument: a filter that compares all of it can be passed by the upper."""
    socket = numbers(machine)["socket"]
    for family in range(64):
        expected = EPERM if family in (38, 40) else ALLOWED
        assert answer(machine, socket, high << 32 | family) == expected


def test_a_machine_without_a_table_is_named():
    with pytest.raises(SandboxError, match=r"no system call filter for riscv64.*x86_64.*runtime=docker"):
        seccomp.program("riscv64")
