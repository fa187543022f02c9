"""Plug-ins of other distributions are found by entry point, in the group of the room's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_gym import registry
from polar_gym.builders import BUILDERS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of installed distributions. The registry reads the entry points again before and after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()


def test_a_plugin_of_another_distribution_is_found(site: Path) -> None:
    folder = site / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[polar_gym.builders]\ntheirs = json:loads\n")
    assert "theirs" in BUILDERS.names()
    assert BUILDERS.get("theirs").__name__ == "loads"
