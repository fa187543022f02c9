"""The file of a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.episodes.output import remove_torn_line
from polar_gym.errors import ConfigError
from tests.support.episodes import make_episode


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    file, whole = tmp_path / "episodes.jsonl", b"".join(make_episode(name, 1.0).to_json() + b"\n" for name in "ab")
    file.write_bytes(whole + make_episode("c", 1.0).to_json()[:40])
    assert [episode.session.session_id for episode in remove_torn_line(file)] == ["a", "b"]
    assert file.read_bytes() == whole
    assert len(remove_torn_line(file)) == 2
    assert file.read_bytes() == whole, "a whole file stays as it is"
    file.write_bytes(b"torn")
    assert (remove_torn_line(file), file.read_bytes()) == ([], b"")


def test_a_line_that_is_no_episode_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"{}\ntorn")
    with pytest.raises(ConfigError, match="not an episode of this version"):
        remove_torn_line(file)
    assert file.read_bytes() == b"{}\ntorn"
