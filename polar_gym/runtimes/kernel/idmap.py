"""A program: shows a directory elsewhere, where what belongs to root, and to its group, belongs to another user.

    idmap.py DIRECTORY AT UID

The kernel does that at a mount (Linux 5.12), whatever the number of files: no file is changed or copied. Files of other
users and groups have no owner there. The directory's group need not be root's: the gateway may have another one, and a
setgid directory gives its own to all that is made in it. Needs root. Each sandbox runs this program, so it imports
little: `pathlib` and `signal` take almost as long as Python's own start.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # on all machines
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_IDMAP = 0x00100000
SIGKILL = 9

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def namespace(uid: int, group: int) -> int:
    """Return a descriptor of a user namespace that maps root and this group to the user outside, and no other id."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.write(writing, b"%d" % libc.unshare(CLONE_NEWUSER))
        libc.pause()
    try:
        checked(int(os.read(reading, 8)))
        for ids, inside in (("uid_map", 0), ("gid_map", group)):
            with open(f"/proc/{holder}/{ids}", "w") as file:  # noqa: PTH123
                file.write(f"{inside} {uid} 1")
        return os.open(f"/proc/{holder}/ns/user", os.O_RDONLY)
    finally:
        os.kill(holder, SIGKILL)
        os.waitpid(holder, 0)


def show(directory: str, at: str, uid: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP, 0, 0, namespace(uid, os.stat(directory).st_gid))  # noqa: PTH116
    mount = checked(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(directory), OPEN_TREE_CLONE))
    size = ctypes.sizeof(attributes)
    checked(libc.syscall(MOUNT_SETATTR, mount, b"", AT_EMPTY_PATH, attributes, size))
    checked(libc.syscall(MOVE_MOUNT, mount, b"", AT_FDCWD, os.fsencode(at), MOVE_MOUNT_F_EMPTY_PATH))


if __name__ == "__main__":
    show(sys.argv[1], sys.argv[2], int(sys.argv[3]))
