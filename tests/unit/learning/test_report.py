"""The figures of episodes, the curve and the bars: means and intervals of any rewards."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from polar_gym.learning.report import BAR, HEIGHT, MARGIN, curve, figures, interval, print_run
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


def evaluation(step: int, reward: float, reach: float) -> dict[str, object]:
    ends = {"reward": reward, "interval": (reward - reach, reward + reach)}
    return {"evaluated": step, "greedy": False, "sessions": 1, "masked": 0, "truncated": 0, **ends}


@pytest.mark.parametrize(
    ("rewards", "heights", "least", "most"),
    [((0.25, 0.75), (216.0, 104.0), "0 %", "100 %"), ((-1.5, 4.0), (262.7, 57.3), "-175 %", "425 %")],
)
def test_the_curve_and_the_bars_hold_all_rewards(
    rewards: tuple[float, float], heights: tuple[float, float], least: str, most: str
) -> None:
    """Guards against a curve that is drawn outside of its picture, and against bars longer than their column."""
    lines = [evaluation(step, reward, reach=0.25) for step, reward in zip((0, 10), rewards, strict=True)]
    drawn = curve({"x": lines})
    (points,) = re.findall(r'polyline points="([^"]*)"', drawn)
    found = [float(point.split(",")[1]) for point in points.split()]
    assert found == list(heights)
    assert all(MARGIN <= height <= HEIGHT - MARGIN for height in found)
    labels = re.findall(r">(-?[0-9]+ %)<", drawn)
    assert (labels[0], labels[-1]) == (least, most)
    print_run(lines, Console(file=(shown := io.StringIO()), width=200))
    first, second = (row.count("█") for row in shown.getvalue().splitlines() if "held out" in row)
    assert first < second <= BAR
