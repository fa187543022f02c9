"""The journals of running sessions that a server keeps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polar_gym.gateway.session.starting import MANIFEST
from polar_gym.protocol import JournalPiece
from polar_gym.service.journal_files import JournalFiles


def piece(lines: str, start: int = 0, attempt: int = 0) -> JournalPiece:
    return JournalPiece(session_id="s", attempt=attempt, start=start, lines=lines, manifest=None if start else "{}")


def test_pieces_are_put_together_and_none_is_taken_twice(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path)
    assert files.append(piece("é\n"), 1000) == 3
    assert files.append(piece("é\n"), 1000) == 3, "the answer to the first one was lost"
    assert files.append(piece("c\n", start=5), 1000) == 3, "another piece is missing before it"
    assert files.append(piece("b\n", start=3), 1000) == 5
    assert files.append(piece("x\n", attempt=1), 1000) == 2
    found = {each.attempt: (each.lines, each.manifest) for each in files.of("s")}
    assert found == {0: ("é\nb\n", "{}"), 1: ("x\n", "{}")}


def test_a_session_takes_no_more_space_than_it_may(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path)
    files.append(piece("a" * 9 + "\n"), 30)
    assert files.append(piece("b" * 30 + "\n", start=10), 30) is None
    assert [each.lines for each in files.of("s")] == ["a" * 9 + "\n"], "its beginning is a record, too"
    assert files.append(piece("c\n", attempt=1), 13) is None
    assert len(files.of("s")) == 1


def test_only_open_sessions_are_kept(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path)
    files.append(piece("a\n"), 1000)
    files.keep_only({"s"})
    assert files.of("s")
    files.keep_only(())
    assert not files.of("s")
    assert not list(tmp_path.iterdir())


def test_journals_are_read_and_written_while_others_are_removed(tmp_path: Path) -> None:
    """Guards against a server that stops because the journals of a session that has ended go while they are read."""
    files = JournalFiles(tmp_path)

    def often(work: Callable[[], object]) -> None:
        for _ in range(1000):
            work()

    works = (lambda: files.append(piece("a\n"), 1000), lambda: files.of("s"), lambda: files.keep_only(()))
    with ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(often, works))


def test_the_rest_of_a_removal_is_no_record(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path)
    files.append(piece("a\n"), 1000)
    (tmp_path / "s" / "0" / MANIFEST).unlink()
    assert not files.of("s")
