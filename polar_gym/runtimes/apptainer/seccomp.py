"""The filter of system calls for the commands in Apptainer's sandboxes.

A command is filtered before it enters the instance: inside there may be no program that could set the filter. So the
filter allows the two calls that `nsenter` makes; the kernel refuses them to an agent, who has no capabilities.
"""

from __future__ import annotations

import platform
import subprocess
import sys

from polar_gym.runtimes import SandboxError, agent
from polar_gym.runtimes.kernel import seccomp

ENTERING = ("chroot", "setns")

_LAUNCH = """
import ctypes, os, sys
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]
instructions = bytes.fromhex(sys.argv[1])
program = Program(len(instructions) // 8, instructions)
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, ctypes.byref(program)):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def launcher() -> tuple[str, ...]:
    """Return the argv prefix of `nsenter` that sets the filter and takes away every way to more rights.

    Raises `SandboxError`.
    """
    return (sys.executable, "-I", "-S", "-c", _LAUNCH, seccomp.program(platform.machine(), ENTERING).hex())


def check() -> list[str]:
    """Return why the system calls of commands cannot be filtered here; empty where they can."""
    try:
        trial = [*launcher(), "true"]
    except SandboxError as error:
        return [str(error)]
    done = subprocess.run(trial, env={"PATH": agent.PATH}, cwd="/", capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return []
    return [
        f"system calls cannot be filtered here ({done.stderr.strip()}); use a kernel that was built with "
        "CONFIG_SECCOMP_FILTER and a Python that runs without environment variables, or set runtime=docker"
    ]
