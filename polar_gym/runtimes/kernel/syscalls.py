"""System calls that a sandbox may not make: their names, and their numbers on each machine.

The facts come from Docker's default profile for a container without capabilities (moby/profiles, commit 3c28324,
`seccomp/default_linux.go`), and from Linux's own tables.
"""

from __future__ import annotations

from dataclasses import dataclass

DENIED: dict[str, tuple[int, int | None]] = {
    # The kernel's keys: all sandboxes would share a user's keyring, which outlives them.
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "request_key": (249, 218),
    # Namespaces, mounts and the root directory.
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # Large parts of the kernel that had many holes.
    "bpf": (321, 280),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Other processes.
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # Where memory lies.
    "get_mempolicy": (239, 236),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # Files past their paths, and the watching of whole file systems.
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "open_by_handle_at": (304, 265),
    # The machine: its kernel, names, clock, ports, swap, accounts and terminals.
    "acct": (163, 89),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    # Calls that Linux had once, or only reserved.
    "_sysctl": (156, None),
    "afs_syscall": (183, None),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "getpmsg": (181, None),
    "nfsservctl": (180, 42),
    "putpmsg": (182, None),
    "query_module": (178, None),
    "security": (185, None),
    "sysfs": (139, None),
    "tuxcall": (184, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "vserver": (236, None),
}
"""Name -> its number on x86-64 and on aarch64."""

LAST = 450
"""The last number before Linux 6.5, on both machines. Programs have to cope with a kernel that has no later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The numbers of Linux's system calls on one kind of processor."""

    audit: int
    """`AUDIT_ARCH_...`, which the kernel tells the filter with a call; other values mean another machine's programs."""
    column: int
    """The index of this machine's numbers in the values of `DENIED`."""
    unused: frozenset[int]
    """The numbers up to `LAST` that no call has."""
    clone: int
    clone3: int
    personality: int
    socket: int


MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        column=0,
        unused=frozenset(range(335, 424)),
        clone=56,
        clone3=435,
        personality=135,
        socket=41,
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        column=1,
        unused=frozenset({*range(244, 260), *range(295, 424)}),
        clone=220,
        clone3=435,
        personality=92,
        socket=198,
    ),
}
"""`platform.machine()` -> its numbers."""

NAMESPACES = 0x7E020000
"""Every `CLONE_NEW...` that `clone` takes."""

PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux's own and 32-bit ones, with and without a uname of 2.6; the last one only asks."""

AF_ALG, AF_VSOCK = 38, 40
"""Sockets that reach the kernel's cryptography, and a virtual machine's host."""
