"""The names and numbers of Linux's system calls, as its own headers have them."""

import re
from pathlib import Path

from tests.support.requirements import need

_HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
_NO_CALLS = ("syscalls", "arch_specific_syscall", "uretprobe", "uprobe")
"""Counts and ranges; and two that the kernel has programs make for itself, without asking a filter."""
_ONLY_32_BIT = range(403, 424)
"""Calls with 64-bit times, which 64-bit machines have under lower numbers."""


def numbers(machine: str) -> dict[str, int]:
    """Name -> number on a machine, named as `platform.machine()` does."""
    header = next((path for name in _HEADERS[machine] if (path := Path(name)).exists()), None)
    need(header, f"the header with the system calls of {machine}", "apt-get install linux-libc-dev")
    assert header is not None
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    return {name: int(number) for name, number in found if int(number) not in _ONLY_32_BIT and name not in _NO_CALLS}
