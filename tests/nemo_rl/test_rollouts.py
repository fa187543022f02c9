"""Rollouts of a real harness through NeMo RL's real Ray actor and NeMo Gym's real servers, and a step on them.

`make show-nemo-rl` has all cases; here are those that need the fewest servers.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.nemo_rl.gym import SUBMODULE, gym_checkout
from tests.nemo_rl.rollout_cases import CASES
from tests.nemo_rl.rollout_laws import LAWS, breaches
from tests.support.requirements import need_bubblewrap, need_node

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def sessions(trainer: Any) -> list[dict[str, Any]]:
    """The facts of each session of the quick cases."""
    gym = gym_checkout(Path(os.environ["NEMO_RL"]))
    if gym is None:
        pytest.skip(f"NeMo RL's checkout has no NeMo Gym: git submodule update --init {SUBMODULE}")
    need_node()
    need_bubblewrap()
    rollouts = importlib.import_module("tests.nemo_rl.rollouts")
    return rollouts.roll_out([case for case in CASES if case.quick], gym)


@pytest.mark.parametrize("law", LAWS)
def test_sessions_of_real_harnesses_are_trained_as_they_must_be(sessions: list[dict[str, Any]], law: str) -> None:
    assert breaches(sessions)[law] == []
