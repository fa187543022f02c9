"""Runs a command, and ends every process that it started, without any privilege.

    subreaper.py DIRECTORY SECONDS COMMAND...

Processes whose parent has ended become children of this one, which kills its children until none is left. It does so
when the command ends, after so many seconds, on SIGTERM, and when its own parent dies. The exit code is the command's.
"""

import ctypes
import os
import signal
import sys

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def children() -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended
        if parent == os.getpid():
            found.append(int(name))
    return found


def end_all() -> None:
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    os._exit(128 + signal.SIGKILL)


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(sys.argv[2]))
    child = os.fork()
    if child == 0:
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        code = 126
        try:
            os.chdir(sys.argv[1])
            code = 127
            os.execvp(sys.argv[3], sys.argv[3:])
        except OSError as error:
            sys.stderr.write(f"{error.filename or sys.argv[3]}: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(code if isinstance(error, FileNotFoundError) else 126)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            end_all()
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


main()
