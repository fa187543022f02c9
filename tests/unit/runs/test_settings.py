"""The settings with which a run began, read again by a run that goes on."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.runs.settings import begin, going_on
from tests.support.episodes import make_episode
from tests.support.sessions import INFO


@pytest.mark.parametrize("damage", [b"", b'{"model": "m", "sett', b"\xff\x00"])
def test_a_damaged_file_of_settings_is_named(tmp_path: Path, damage: bytes) -> None:
    """Guards against a traceback of the JSON parser, which says neither which file it read nor how to go on."""
    config, state = load_config(overrides=["engine=embedded", "runtime=bubblewrap"]), StateDirectory(tmp_path)
    begin(config, state, INFO)
    file = tmp_path / "settings.json"
    assert going_on(config, state) == config
    file.write_bytes(damage)
    named = rf"^{re.escape(str(file))}: not JSON: .*; restore the file, or set rollout\.output to another file"
    with pytest.raises(ConfigError, match=named):
        going_on(config, state)


def test_a_harness_is_told_the_day_of_the_episodes_where_their_state_is_gone(tmp_path: Path) -> None:
    """Guards against a file that no run can go on with from the next day on."""
    config = load_config(overrides=["engine=embedded", "harness=pi"])
    assert config.harness.today == date.today()
    episode = make_episode("a", 1.0)
    episode.request.agent.today = date(2026, 1, 31)
    assert going_on(config, StateDirectory(tmp_path), [episode]).harness.today == date(2026, 1, 31)
