"""The figures of episodes: means and intervals of any rewards."""

from __future__ import annotations

import pytest

from polar_gym.learning.report import figures, interval
from tests.support.episodes import make_episode


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([-1.0, 2.0], -2.440, 3.440),
        ([-0.1, 0.0], -0.148, 0.048),
        ([-1.0, -1.0, -1.0], -1.0, -1.0),
        ([2.0], 2.0, 2.0),
        ([0.0, 1.0], 0.095, 0.905),
        ([], 0.0, 1.0),
    ],
)
def test_rewards_outside_of_zero_and_one_have_an_interval_around_their_mean(
    rewards: list[float], low: float, high: float
) -> None:
    """Guards against a ValueError after the sessions were played, and against an interval without its mean: Wilson's is
    for shares."""
    assert interval(rewards) == pytest.approx((low, high), abs=1e-3)
    assert figures([make_episode(f"s{place}", reward) for place, reward in enumerate(rewards)])["interval"] == interval(
        rewards
    )
