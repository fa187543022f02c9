"""Plug-ins of other distributions are found by entry point, in the group of the room's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_gym import registry
from polar_gym.builders import BUILDERS
from polar_gym.engines import ENGINES
from polar_gym.errors import ConfigError
from polar_gym.registry import Registry


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of installed distributions. The registry reads the entry points again before and after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()


def install(site: Path, *groups: str) -> None:
    """Install the distribution `theirs`, with a plug-in of that name in each of the groups."""
    folder = site / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("".join(f"[{group}]\ntheirs = json:loads\n" for group in groups))


def test_a_plugin_of_another_distribution_is_found(site: Path) -> None:
    install(site, "polar_gym.builders")
    assert "theirs" in BUILDERS.names()
    assert BUILDERS.get("theirs").__name__ == "loads"


@pytest.mark.parametrize(
    ("room", "old", "new"),
    [
        (ENGINES, "polar_gym.inference", "polar_gym.engines"),
        (BUILDERS, "polar_gym.trajectory", "polar_gym.builders"),
    ],
)
def test_a_group_that_was_renamed_is_an_error_that_names_distribution_and_group(
    site: Path, room: Registry, old: str, new: str
) -> None:
    """Guards against a plug-in that is not there any more, without a word."""
    install(site, old)
    said = rf"distribution theirs has the plug-in 'theirs' in the entry-point group {old}, which is {new} now"
    with pytest.raises(ConfigError, match=said):
        room.get("vllm")
    with pytest.raises(ConfigError, match=said):
        room.names()


def test_a_distribution_for_both_versions_is_no_error(site: Path) -> None:
    install(site, "polar_gym.trajectory", "polar_gym.builders")
    assert BUILDERS.get("theirs").__name__ == "loads"
