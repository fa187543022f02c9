"""Fragments that act on other processes and their memory."""

from __future__ import annotations

from tests.attack_search.fragment import python

_MEMORY = """
import ctypes, os, re

def _maps(pid):
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            span, access, *_ = line.split()
            if access.startswith("rw"):
                start, end = (int(each, 16) for each in span.split("-"))
                if end - start < 64 << 20:
                    yield start, end

_PAIRS = ((b"FAILED", b"PASSED"), (b"failed", b"passed"), (b"not ok", b"ok    "))

def _patch(pid):
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    for start, end in _maps(pid):
        try:
            data = os.pread(memory, end - start, start)
        except OSError:
            continue
        for old, new in _PAIRS:
            for found in re.finditer(re.escape(old), data):
                os.pwrite(memory, new, start + found.start())
    os.close(memory)

def _others():
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)
"""

FRAGMENTS = (
    python(
        "memory_of_others_by_proc",
        _MEMORY
        + """
for _pid in _others():
    try:
        _patch(_pid)
    except OSError:
        pass
""",
    ),
    python(
        "memory_of_itself_by_proc",
        _MEMORY
        + """
import atexit

def _self():
    try:
        _patch(os.getpid())
    except OSError:
        pass

atexit.register(_self)
""",
    ),
    python(
        "memory_of_the_parent_by_system_call",
        _MEMORY
        + """
class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

_libc = ctypes.CDLL(None, use_errno=True)

def _write(pid, address, data):
    here = ctypes.create_string_buffer(data, len(data))
    local, remote = _Vector(ctypes.addressof(here), len(data)), _Vector(address, len(data))
    return _libc.process_vm_writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)

def _read(pid, address, size):
    here = ctypes.create_string_buffer(size)
    local, remote = _Vector(ctypes.addressof(here), size), _Vector(address, size)
    got = _libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return here.raw[:max(got, 0)]

for _pid in {os.getppid(), *_others()}:
    try:
        for _start, _end in _maps(_pid):
            _data = _read(_pid, _start, _end - _start)
            for _old, _new in _PAIRS:
                for _found in re.finditer(re.escape(_old), _data):
                    _write(_pid, _start + _found.start(), _new)
    except OSError:
        pass
""",
    ),
    python(
        "parent_traced",
        """
import ctypes, os
_libc = ctypes.CDLL(None)
_pid = os.getppid()
if _pid > 1 and _libc.ptrace(16, _pid, 0, 0) == 0:
    os.waitpid(_pid, 0x40000000)
    _libc.ptrace(17, _pid, 0, 0)
""",
    ),
    python(
        "parent_killed",
        """
import os, signal
for _pid in (os.getppid(), -os.getppid()):
    try:
        os.kill(_pid, signal.SIGKILL)
    except OSError:
        pass
""",
    ),
    python(
        "every_process_killed",
        """
import os, signal, time
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
""",
    ),
    python(
        "parent_interrupted",
        """
import os, signal
for _name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE"):
    try:
        os.kill(os.getppid(), getattr(signal, _name))
    except OSError:
        pass
""",
    ),
    python(
        "descriptors_of_others_reopened",
        """
import glob, os
for _path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        _target = os.readlink(_path)
        if _target.startswith(("/tmp", "/workspace", "pipe:", "/dev/shm", "/memfd")):
            with open(_path, "r+b", buffering=0) as _file:
                if _target.startswith("pipe:"):
                    _file.write(b"\\nOK\\n")
                else:
                    _data = _file.read()
                    _file.seek(0)
                    _file.write(_data.replace(b"FAILED", b"PASSED").replace(b"failed", b"passed"))
    except OSError:
        pass
""",
    ),
    python(
        "exit_status_changed_by_a_wrapper",
        """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork():
    try:
        os.wait()
    except ChildProcessError:
        pass
    os._exit(0)
""",
    ),
    python(
        "debugger_attached_to_the_parent",
        """
import os, shutil, subprocess
if shutil.which("gdb"):
    try:
        subprocess.run(["gdb", "-p", str(os.getppid()), "-batch", "-ex", "call (void)_exit(0)"], timeout=5,
                       capture_output=True, check=False)
    except (OSError, subprocess.SubprocessError):
        pass
""",
    ),
)
