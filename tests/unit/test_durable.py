"""Files that processes share: whole or as they were, locked by one at a time, made once, read line by line."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polar_gym import durable
from polar_gym.errors import ConfigError
from polar_gym.record import Record

HALF_WRITTEN = """
import os, signal, sys
from pathlib import Path
from polar_gym import durable
with durable.replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""

HOLDER = """
import sys
from pathlib import Path
from polar_gym import durable
with durable.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


class Entry(Record):
    number: int


@contextmanager
def other_process_holds(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until its stdin is closed."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.stdin.close()


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    """Guards against a machine whose `/dev/null` is a file, and a link that no longer leads to the file."""
    (tmp_path / "real").mkdir()
    (link := tmp_path / "link").symlink_to("real/file")
    for content in (b"one", b"two"):
        durable.write(link, content)
        assert (tmp_path / "real" / "file").read_bytes() == content
    assert link.is_symlink()
    read, write = os.pipe()
    durable.write(Path(f"/dev/fd/{write}"), b"piped")
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"piped"


def test_a_killed_writer_leaves_the_old_file_and_a_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.write(path, b"old")
    killed = subprocess.run([sys.executable, "-c", HALF_WRITTEN, str(path)], check=False)
    assert killed.returncode == -9
    assert path.read_bytes() == b"old"
    assert [left.read_bytes() for left in tmp_path.glob(".*")] == [b"half"]
    durable.remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    durable.write(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)

    def write() -> None:
        with durable.replacing(path) as file:
            file.write(b"half")
            if call == "write":
                full()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}


def test_writers_without_a_lock_each_write_a_whole_file(tmp_path: Path) -> None:
    """Guards against one temporary name for all: the second writer would cut the first one's file."""
    path = tmp_path / "file"
    with durable.replacing(path) as first:
        first.write(b"first")
        durable.write(path, b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"


def test_the_mode_is_that_of_the_file_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        durable.write(tmp_path / "open", b"")
        durable.write(tmp_path / "own", b"", mode=0o600)
        durable.make_directory(tmp_path / "parent" / "directory", mode=0o700)
    finally:
        os.umask(before)
    names = ("open", "own", "parent", "parent/directory")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names]
    assert modes == [0o644, 0o600, 0o755, 0o700]


def test_a_lock_excludes_another_process_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_process_holds(path) as holder:
        with pytest.raises(BlockingIOError):
            durable.locked(path, wait=False)
        holder.kill()
        holder.wait()
        durable.locked(path, wait=False).close()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_process_holds(path) as holder:
        waiting = threading.Thread(target=lambda: durable.locked(path).close())
        waiting.start()
        assert holder.poll() is None
        assert waiting.is_alive()
        assert holder.stdin is not None
        holder.stdin.close()
        waiting.join()


def test_what_is_made_once_is_whole_and_made_once(tmp_path: Path) -> None:
    target, calls = tmp_path / "made", list[Path]()
    (tmp_path / ".made~killed").mkdir()
    other = tmp_path / ".made.1~running"
    """In it, another process makes `made.1`."""
    other.mkdir()

    def make(scratch: Path) -> Path:
        calls.append(scratch)
        (scratch / "result").mkdir()
        (scratch / "rest").touch()
        if len(calls) == 1:
            raise RuntimeError("failed")
        return scratch / "result"

    with pytest.raises(RuntimeError, match="failed"):
        durable.make_once(target, make)
    assert not target.exists()
    durable.make_once(target, make)
    durable.make_once(target, make)
    assert len(calls) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "made", "made.lock"]


def test_what_is_made_once_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a cache of empty files, which counts as whole for ever, after a crash of the machine."""
    target, synced = tmp_path / "made", list[bytes]()

    def make(scratch: Path) -> Path:
        (scratch / "result").write_bytes(b"content")
        return scratch / "result"

    def sync(path: Path) -> None:
        assert not target.exists()
        synced.append(path.read_bytes())

    durable.sync_file_system(tmp_path)
    monkeypatch.setattr(durable, "sync_file_system", sync)
    durable.make_once(target, make)
    assert synced == [target.read_bytes()] == [b"content"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON: .*; the file must hold one object a line"),
        (b"\xff", "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"{}", "not an entry: number: is required"),
        (b'{"number": "x"}', "not an entry: number='x': Input should be a valid integer"),
        (b'{"number": 1, "more": 2}', "not an entry: more=2: unknown key; known here: number"),
    ],
)
def test_an_error_names_the_file_the_line_and_the_problem(line: bytes, problem: str) -> None:
    read = durable.records([b'{"number": 1}\n', b"\n", line], "entries.jsonl", Entry, "an entry")
    assert next(read) == Entry(number=1)
    with pytest.raises(ConfigError, match=rf"^entries\.jsonl:3: {problem}"):
        next(read)


def test_a_cut_last_line_is_left_out_only_where_the_caller_asks() -> None:
    lines = [b'{"number": 1}\n', b'{"num']
    assert [value for _, value in durable.json_lines(lines, "f", may_be_cut=True)] == [{"number": 1}]
    with pytest.raises(ConfigError, match=r"^f:2: not JSON"):
        list(durable.json_lines(lines, "f"))
    with pytest.raises(ConfigError, match=r"^f:1: not JSON"):
        list(durable.json_lines([b'{"num\n', *lines], "f", may_be_cut=True))


def test_a_directory_that_is_no_longer_needed_goes_and_one_that_cannot_go_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for _ in range(2):
        durable.remove_tree(tmp_path / "a")
    assert (list(tmp_path.iterdir()), caplog.messages) == ([], [])
    (tmp_path / "file").touch()
    durable.remove_tree(tmp_path / "file")  # stands for an entry that the system does not remove
    assert "file could not be removed as a whole: " in caplog.text
