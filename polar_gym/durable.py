"""Files on a disk that several processes share: written whole, locked, made once, and read as JSON lines.

A file is written beside its place, synced, and renamed. A reader therefore sees the old file or the new one, never a
part of it, and the new file survives a stop of the machine. A process that is killed while it writes leaves a hidden
file, which `remove_partial` removes. All functions here block: call them off the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson
from pydantic import ValidationError

from polar_gym.errors import ConfigError, explain
from polar_gym.record import Record

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` at the end of the block, and is on the disk by then.

    An exception leaves `path` as it was. Writers need no lock: each writes a separate file, and the last one stays.
    `mode` is the file's, less the umask. A link stays, and its file is replaced; a device or a pipe is written to.
    Raises `OSError`.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a whole file as `replacing` does."""
    with replacing(path, mode) as file:
        file.write(data)


def remove_partial(directory: Path) -> None:
    """Remove the files below a directory that killed writers left. No process may write there meanwhile."""
    for path in directory.rglob(".*.partial"):
        path.unlink()


def remove_tree(directory: Path) -> None:
    """Remove a directory that is no longer needed, if it is there. Log the first entry that cannot be removed; the rest
    is removed all the same."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.error("%s could not be removed as a whole: %s", directory, error)
        shutil.rmtree(directory, ignore_errors=True)


def open_to_all(directory: Path) -> None:
    """Let all users read a directory and all in it, whatever the umask of its maker. Do nothing where it is open, or
    another user's.

    The directory itself comes last: where it is open, all in it is. Raises `OSError`.
    """
    about = directory.stat()
    if about.st_mode & 0o005 == 0o005 or os.geteuid() not in (0, about.st_uid):
        return
    for place, _, names in os.walk(directory, topdown=False):
        for path in (*(Path(place, name) for name in names), Path(place)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                path.chmod(mode | 0o444 | (0o111 if mode & 0o111 else 0))


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents, and put their names on the disk. `mode` is that of `path` only."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_directory(path.parent)


def sync_file_system(path: Path) -> None:
    """Put all that was written to the file system of a path on the disk: thousands of small files in one go."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on the disk: a synced file is lost with its name."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path, *, wait: bool = True, mode: int = 0o666) -> IO[bytes]:
    """Return the file at `path`, made if it is missing, open to read and to append, and locked for this process.

    The lock lasts until the file is closed, or the process ends. Another process waits for it; with `wait=False` it
    gets a `BlockingIOError`. Raises `OSError` where the file cannot be opened.
    """
    file = open(path, "ab+", opener=partial(os.open, mode=mode))  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep systemd-tmpfiles out of a directory during the block.

    It removes old files of /tmp one by one, but not below a directory on which a process holds a lock (tmpfiles.d(5)).
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, which is not /tmp's
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def make_once(target: Path, make: Callable[[Path], Path]) -> None:
    """Make a file or a directory that processes of this machine share, unless it is there.

    `make` gets an empty directory beside `target`, and returns the path in it that is renamed to `target`. A `target`
    that exists is therefore whole, also after a crash of the machine. Other processes wait meanwhile. The directories
    that killed processes left are removed.
    """
    if target.exists():
        return
    with locked(target.with_name(f"{target.name}.lock")):
        if target.exists():
            return
        for leftover in target.parent.glob(f".{target.name}~*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}~", dir=target.parent) as temporary:
            made = make(Path(temporary))
            sync_file_system(made)
            made.rename(target)


def json_lines(
    lines: Iterable[bytes],
    name: object,
    *,
    loads: Callable[[bytes], Any] = orjson.loads,
    may_be_cut: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (`name:number`) and the object of each line that is not blank.

    `may_be_cut` leaves out a last line without a newline: its writer was killed. Raises `ConfigError` naming the file,
    the line and the problem.
    """
    for number, line in enumerate(lines, start=1):
        if may_be_cut and not line.endswith(b"\n"):
            return
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            value = loads(line)
        except RecursionError as error:
            raise ConfigError(f"{place}: nested too deeply to be read; leave this line out") from error
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON: {error}; the file must hold one object a line") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: expected a JSON object, got {type(value).__name__}")
        yield place, value


_BLOCK = 1 << 20
"""Bytes that are searched for a newline at once."""


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a killed process left unfinished, if there is one. Raises `OSError`."""
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = file.seek(max(0, end - _BLOCK))
            if found := file.read(end - begin).rfind(b"\n") + 1:
                end = begin + found
                break
            end = begin
        if end < size:
            file.truncate(end)


def records(lines: Iterable[bytes], name: object, kind: type[R], what: str, *, may_be_cut: bool = False) -> Iterator[R]:
    """Yield the record of each line that is not blank; `what` is its name in errors, e.g. "an episode".

    `may_be_cut` is that of `json_lines`. Raises `ConfigError` as `json_lines` does, and where an object is no such
    record: then it names the fields.
    """
    for place, value in json_lines(lines, name, may_be_cut=may_be_cut):
        try:
            yield kind.model_validate(value)
        except ValidationError as error:
            raise ConfigError(f"{place}: not {what}: {explain(error, kind)}") from error


def read_records(file: Path, kind: type[R], noun: str, what: str) -> Iterator[R]:
    """Yield the records of a file of JSON lines as `records` does; `-` is stdin. `noun` and `what` name a record.

    Raises `ConfigError` also where the file cannot be read, or holds no record.
    """
    found = None
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as lines:
            for found in records(lines, file, kind, what):
                yield found
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if found is None:
        raise ConfigError(f"{file}: it holds no {noun}")
