"""A node's directory: which names it takes, whom it locks out, what it finds again, and what it evicts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_gym.errors import ConfigError
from polar_gym.gateway.node.state import MAX_ATTEMPT, Key, Manifest, StateDirectory
from polar_gym.protocol import DeliveryAnswer, Dispatch, JournalPiece
from polar_gym.schema import Episode
from tests.support.episodes import make_episode

EPISODE = make_episode("s", 1.0)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    state = StateDirectory(tmp_path / "state")
    with state.lock():
        yield state


def manifest(episode: Episode = EPISODE) -> Manifest:
    return Manifest(session=episode.session, request=episode.request, engine=episode.engine)


def ended(state: StateDirectory, name: str, at: float, size: int) -> Key:
    """Keep a finished session of so many bytes that ended at this time."""
    key = Key(name, 0)
    files = state.files(key)
    files.directory.mkdir()
    files.episode.write_bytes(b" " * size)
    os.utime(files.episode, (at, at))
    return key


@pytest.mark.parametrize("session_id", ["", "a" * 65, "../a", "a/b", "a.b", "ä", "a\n"])
def test_only_a_name_that_is_safe_as_a_file_is_a_key(session_id: str) -> None:
    with pytest.raises(ValueError, match=r"^session_id=.*expected 1 to 64 letters, digits, '_' or '-'"):
        Key(session_id, 0)


@pytest.mark.parametrize("attempt", [-1, MAX_ATTEMPT + 1])
def test_an_attempt_has_a_number_that_is_found_again(attempt: int) -> None:
    with pytest.raises(ValueError, match=rf"attempt={attempt}: expected a number from 0 to {MAX_ATTEMPT}"):
        Key("a", attempt)


def test_one_process_serves_a_directory(tmp_path: Path) -> None:
    state, other = StateDirectory(tmp_path), StateDirectory(tmp_path)
    in_use = r"another process serves it; stop that one, or set state to a directory"
    with state.lock(), pytest.raises(ConfigError, match=in_use):
        other.lock()
    other.lock().close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=rf"^state={tmp_path}/file/state: .*; name a directory that can be written"):
        StateDirectory(tmp_path / "file" / "state").lock()


def test_sessions_with_a_manifest_are_found_again_and_nothing_else(state: StateDirectory) -> None:
    keys = [Key("a", 0), Key("a", MAX_ATTEMPT), Key("b-_9", 2)]
    for key in keys:
        state.begin(key, manifest())
    (state.sessions / "c.0").mkdir()
    (state.sessions / "no key").mkdir()
    (state.sessions / "d.0").write_text("a file")
    assert sorted(state.known()) == keys
    assert state.read_manifest(keys[0]) == manifest()


def test_only_the_owner_reads_what_a_session_leaves(state: StateDirectory) -> None:
    key = Key("s", 0)
    state.begin(key, manifest())
    state.finish(key, EPISODE)
    state.mark_delivered(key, DeliveryAnswer(accepted=True))
    files = state.files(key)
    assert files.directory.stat().st_mode & 0o777 == 0o700
    written = [files.manifest, files.episode, files.delivered]
    assert [path.stat().st_mode & 0o777 for path in written] == [0o600] * 3
    assert sorted(files.directory.iterdir()) == sorted(written), "no temporary file is left"
    assert Episode.from_json(files.episode.read_bytes()).session == EPISODE.session


def test_what_ended_too_long_ago_is_evicted(state: StateDirectory) -> None:
    old, new = ended(state, "old", 100.0, 1), ended(state, "new", 200.0, 1)
    assert state.evict([old, new], 250.0, keep_seconds=100, keep_bytes=1000) == [old]
    assert not state.files(old).directory.exists()
    assert state.files(new).directory.exists()


def test_the_oldest_are_evicted_until_the_others_fit(state: StateDirectory) -> None:
    keys = [ended(state, name, at, 400) for name, at in (("c", 30.0), ("a", 10.0), ("b", 20.0))]
    assert state.evict(keys, 40.0, keep_seconds=1000, keep_bytes=800) == [Key("a", 0)]
    assert state.evict(keys[::2], 40.0, keep_seconds=1000, keep_bytes=0) == [Key("b", 0), Key("c", 0)]


def test_a_session_with_sandboxes_left_is_not_evicted(state: StateDirectory) -> None:
    """Guards against a sandbox that no later process removes, because its session's mark went with the directory."""
    marked, other = ended(state, "a", 10.0, 400), ended(state, "b", 20.0, 400)
    state.files(marked).sandboxes_left.touch()
    assert state.evict([marked, other], 30.0, keep_seconds=1000, keep_bytes=400) == [], "it takes no other's place"
    assert state.evict([marked, other], 5000.0, keep_seconds=1000, keep_bytes=400) == [other]
    state.files(marked).sandboxes_left.unlink()
    assert state.evict([marked], 5000.0, keep_seconds=1000, keep_bytes=400) == [marked]


def test_a_session_whose_directory_is_gone_already_counts_as_evicted(state: StateDirectory) -> None:
    gone, there = Key("gone", 0), ended(state, "there", 10.0, 1)
    assert state.evict([gone, there], 10.0, keep_seconds=1, keep_bytes=1) == [gone]


def test_news_of_a_journal_are_its_next_whole_lines(state: StateDirectory) -> None:
    """Guards against half a line: the node takes one back that it cannot write to its end."""
    key = Key("s", 0)
    state.begin(key, manifest())
    state.files(key).journal.write_bytes(b"first\nsecond\nthi")
    (all_of_it,) = state.news({key: 0})
    assert all_of_it.lines == "first\nsecond\n"
    assert Manifest.from_json((all_of_it.manifest or "").encode()) == manifest()
    (rest,) = state.news({key: 6})
    assert (rest.start, rest.lines, rest.manifest) == (6, "second\n", None)
    assert not state.news({key: 13})


def test_a_line_that_is_longer_than_a_round_of_news_is_told_whole(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a session whose journal is never sent again after a long line, such as one with an image, and
    against a link that broke where another session came after such a line."""
    monkeypatch.setattr("polar_gym.gateway.node.state.PIECES_BYTES", 8)
    small, large = Key("small", 0), Key("large", 0)
    for key, text in ((small, b"a\n"), (large, b"longer than that\nb\n")):
        state.begin(key, manifest())
        state.files(key).journal.write_bytes(text)
    assert [piece.lines for piece in state.news({small: 0, large: 0})] == ["a\n"], "next round"
    assert [piece.lines for piece in state.news({small: 2, large: 0})] == ["longer than that\n"]
    assert [piece.lines for piece in state.news({large: 0, small: 0})] == ["longer than that\n"]
    assert [piece.lines for piece in state.news({small: 2, large: 17})] == ["b\n"]


def test_a_journal_that_ran_elsewhere_goes_with_the_session_that_needs_it(state: StateDirectory) -> None:
    key, elsewhere = ended(state, "s", 10.0, 1), StateDirectory(state.files(Key("s", 0)).record)
    elsewhere.put(JournalPiece(session_id="s", attempt=0, lines="x" * 500, manifest=""))
    assert elsewhere.files(Key("s", 0)).journal.read_text() == "x" * 500
    assert state.files(key).bytes() > 500
    assert state.evict([key], 40.0, keep_seconds=1000, keep_bytes=400) == [key]
    assert not state.files(key).directory.exists()


def test_a_session_goes_on_with_no_record_of_an_attempt_that_was_given_up(state: StateDirectory) -> None:
    """Guards against a failed attempt that is replayed as the sample's own: its journal is on the server, and its end
    is not, because another node had it. The next attempt began anew there and was lost while it waited."""
    order = Dispatch(
        session_id="s",
        attempt=2,
        sample_index=0,
        request=EPISODE.request,
        resume=True,
        records=[JournalPiece(session_id="s", attempt=0, lines="{}\n", manifest=manifest().to_json().decode())],
    )
    found = state.record_for(order, (), ())
    assert found is not None
    assert found.owned
    assert state.record_for(order.model_copy(update={"record_from": 1}), (), ()) is None
