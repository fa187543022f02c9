"""The filter of the system calls of sandboxes: a seccomp program, and the same as a profile for Docker and Apptainer.

The filter answers as Docker's default profile does for a container without capabilities. A call of `DENIED` and a
number that is not in use get EPERM. `clone3`, whose flags a filter cannot read, and every number above `LAST` get
ENOSYS, as from an older kernel: programs then try the old way. Docker lists the allowed calls. This filter lists the
denied ones, which are five times fewer; the unused numbers and `LAST` keep out calls that Linux will get later.

Programs of other machines (32-bit ones, x32) get ENOSYS for all their calls, because they number them differently.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.kernel.syscalls import AF_ALG, AF_VSOCK, DENIED, LAST, MACHINES, NAMESPACES, PERSONALITIES

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip where the condition holds, instructions to skip where it does not, operand."""

LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word of the call's description, compare it with the operand, end."""

NUMBER, ARCHITECTURE, ARGUMENT, ARGUMENT_HIGH = 0, 4, 16, 20
"""Offsets in `struct seccomp_data`; the two halves of the first argument are in the order of little-endian machines."""

ALLOW = 0x7FFF0000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

ARCHITECTURES = (
    {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
    {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
)


@cache
def program(machine: str, allowed: tuple[str, ...] = ()) -> bytes:
    """Return the filter for a machine, named as `platform.machine()` does, which allows these calls of `DENIED`.

    Raises `SandboxError`.
    """
    if machine not in MACHINES:
        raise SandboxError(
            f"there is no system call filter for {machine} processors (only for {', '.join(MACHINES)}); "
            "set runtime=docker"
        )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine, allowed))


@cache
def profile(allowed: tuple[str, ...] = ()) -> str:
    """Return the filter as Docker and Apptainer read it, which lets 32-bit programs run and allows these calls too.

    A rule compares bits only, because a profile can neither combine comparisons of one argument nor except a value.
    """
    query = PERSONALITIES[-1]
    known = max(PERSONALITIES[:-1])
    bits = [1 << bit for bit in range(query.bit_length() - 1)]
    last = query ^ sum(bits)  # set in a query alone, which has all other bits too
    rules = [
        {"names": sorted({*DENIED} - {*allowed})},
        {"names": sorted({"clone3"} - {*allowed}), "errnoRet": errno.ENOSYS},
        *(_where("clone", bit, bit) for bit in bits if bit & NAMESPACES),
        *(_where("socket", query, family) for family in (AF_ALG, AF_VSOCK)),
        *(_where("personality", last | bit, bit) for bit in bits if not bit & known),
        *(_where("personality", last | bit, last) for bit in bits),
    ]
    denied = [{"action": "SCMP_ACT_ERRNO", **rule} for rule in rules]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "archMap": ARCHITECTURES, "syscalls": denied})


def _where(call: str, mask: int, value: int) -> dict[str, Any]:
    """Return the rule for a call whose first argument has this value in the bits of the mask."""
    return {"names": [call], "args": [{"index": 0, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}]}


def _instructions(name: str, allowed: tuple[str, ...]) -> Iterator[Instruction]:
    machine = MACHINES[name]
    named = (numbers[machine.column] for call, numbers in DENIED.items() if call not in allowed)
    denied = machine.unused.union(number for number in named if number is not None)
    yield (LOAD, 0, 0, ARCHITECTURE)
    yield from ((EQUAL, 1, 0, machine.audit), _end(ENOSYS))
    yield (LOAD, 0, 0, NUMBER)
    yield from ((GREATER, 0, 1, LAST), _end(ENOSYS))
    yield from _if_equal(machine.clone3, ENOSYS)
    for first, last in _runs(denied):
        yield from ((AT_LEAST, 0, 2, first), (GREATER, 1, 0, last), _end(EPERM))
    arguments = {machine.clone: _clone(), machine.personality: _personality(), machine.socket: _socket()}
    for number, block in arguments.items():
        yield from ((EQUAL, 0, len(block), number), *block)
    yield _end(ALLOW)


def _clone() -> list[Instruction]:
    return [(LOAD, 0, 0, ARGUMENT), (ANY_BIT, 0, 1, NAMESPACES), _end(EPERM), _end(ALLOW)]


def _personality() -> list[Instruction]:
    known = [instruction for value in PERSONALITIES for instruction in _if_equal(value, ALLOW)]
    return [
        *((LOAD, 0, 0, ARGUMENT_HIGH), (EQUAL, 1, 0, 0), _end(EPERM)),
        *((LOAD, 0, 0, ARGUMENT), *known, _end(EPERM)),
    ]


def _socket() -> list[Instruction]:
    """Return the instructions for `socket`. They read the lower half of the argument only, as the kernel does."""
    return [(LOAD, 0, 0, ARGUMENT), *_if_equal(AF_ALG, EPERM), *_if_equal(AF_VSOCK, EPERM), _end(ALLOW)]


def _if_equal(value: int, verdict: int) -> tuple[Instruction, Instruction]:
    return (EQUAL, 0, 1, value), _end(verdict)


def _end(verdict: int) -> Instruction:
    return (RETURN, 0, 0, verdict)


def _runs(numbers: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Return the first and the last number of each run of consecutive numbers."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return zip(starts, ends, strict=True)
