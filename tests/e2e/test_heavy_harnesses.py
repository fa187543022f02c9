"""Whole episodes of harnesses that need several seconds of processor time to start, in one runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.harnesses import HARNESSES
from tests.e2e.play import solve_a_task
from tests.support.requirements import need_bubblewrap, need_node
from tests.wire.harness_probe import installed


@pytest.mark.parametrize("harness", ["qwen_code", "opencode", "mini_swe_agent", "mistral_vibe"])
def test_it_solves_a_task(harness: str, tmp_path: Path) -> None:
    need_node()
    need_bubblewrap()
    installed(HARNESSES.get(harness))
    solve_a_task("bubblewrap", harness, tmp_path)
