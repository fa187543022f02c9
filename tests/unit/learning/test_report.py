"""The figures of episodes, the curve and the bars: means and intervals of any rewards."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from polar_gym.episodes.pass_at_k import wilson
from polar_gym.errors import ConfigError
from polar_gym.learning.files import read_rows
from polar_gym.learning.report import (
    BAR,
    HEIGHT,
    MARGIN,
    check_scored,
    cpu,
    curve,
    figures,
    interval,
    print_run,
    sentence,
)
from polar_gym.schema import Episode, Failure, Status
from tests.learning.proofs import PROOFS
from tests.support.episodes import make_episode


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([-1.0, 2.0], -2.440, 3.440),
        ([-0.1, 0.0], -0.148, 0.048),
        ([-1.0, -1.0, -1.0], -1.0, -1.0),
        ([2.0], 2.0, 2.0),
        ([0.0, 1.0], 0.095, 0.905),
    ],
)
def test_rewards_outside_of_zero_and_one_have_an_interval_around_their_mean(
    rewards: list[float], low: float, high: float
) -> None:
    """Guards against a ValueError after the sessions were played, and against an interval without its mean: Wilson's is
    for shares."""
    episodes = [make_episode(f"s{place}", reward, task_id=str(place)) for place, reward in enumerate(rewards)]
    assert figures(episodes)["interval"] == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 1.0, 1.0), (1.5, -0.5, 1.0, 2.0)])
def test_sessions_that_repeat_a_task_do_not_narrow_the_interval(rewards: tuple[float, ...]) -> None:
    """Guards against an interval of 200 sessions of 4 tasks as of 200 tasks: much too narrow."""
    once = [make_episode(f"s{place}", reward, task_id=str(place)) for place, reward in enumerate(rewards)]
    again = [
        make_episode(f"s{place}-{time}", reward, task_id=str(place))
        for place, reward in enumerate(rewards)
        for time in range(50)
    ]
    assert figures(again)["tasks"] == len(rewards)
    assert figures(again)["interval"] == pytest.approx(figures(once)["interval"])
    line = {"evaluated": 5, "greedy": False, **figures(again)}
    assert sentence(line).startswith("after step 5, 200 sessions of 4 held-out tasks, sampled: mean reward")


def test_the_proofs_have_the_intervals_that_their_figures_give() -> None:
    """Guards against another interval than that of the published curves, whose sessions have a task each."""
    lines = [line for path in sorted(PROOFS.glob("*.jsonl")) for line in read_rows(path) if "evaluated" in line]
    assert lines
    for line in lines:
        solved = round(line["reward"] * line["sessions"])
        rewards = [[1.0]] * solved + [[0.0]] * (line["sessions"] - solved)
        assert list(interval(rewards)) == pytest.approx(line["interval"], rel=1e-12)


def test_sessions_without_a_reward_are_told() -> None:
    """Guards against a mean of one session that is told as one of 200 tasks."""
    episodes = [make_episode(f"s{place}", None if place else 1.0, task_id=str(place)) for place in range(200)]
    line = {"evaluated": 5, "greedy": False, **figures(episodes)}
    assert line["interval"] == pytest.approx(wilson(1.0, 1))
    assert "200 held-out tasks, sampled (199 without a reward" in sentence(line)
    assert "199 x engine_error, e.g. 'gone'" in sentence(line)


def test_sessions_that_a_budget_ended_are_told() -> None:
    """Guards against a mean of sessions that ran out of time, told as one of wrong answers."""
    line = {"evaluated": 5, "greedy": False, "masked": 0, "tasks": 2, "sessions": 2, "truncated": 1}
    told = sentence({**line, "reward": 0.5, "interval": (0.1, 0.9)})
    assert "2 held-out tasks, sampled (1 ended by a budget, with reward 0): mean reward 0.500" in told


def test_a_session_without_a_reward_has_not_the_reward_0() -> None:
    """Guards against a session whose time ended before its first call, told as one of reward 0 and as one of none."""
    late = make_episode("s1", None)
    late.session.truncated_by = "time"
    found = figures([make_episode("s0", 1.0, task_id="0"), late])
    assert (found["masked"], found["truncated"]) == (1, 0)


def test_sampling_during_an_update_counts_once() -> None:
    """Guards against columns that add up to more than all: with `--overlap`, sessions run during the update."""
    line = {"training_cpu": 5.0, "training_sampling_cpu": 2.0, "rollout_cpu": 4.0, "rollout_sampling_cpu": 1.0}
    assert cpu(line)[1:] == (3.0, 3.0, 3.0)


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
    drawn = curve({"x&y": lines})
    assert ">x&amp;y<" in drawn
    (points,) = re.findall(r'polyline points="([^"]*)"', drawn)
    found = [float(point.split(",")[1]) for point in points.split()]
    assert found == list(heights)
    assert all(MARGIN <= height <= HEIGHT - MARGIN for height in found)
    labels = re.findall(r">(-?[0-9]+ %)<", drawn)
    assert (labels[0], labels[-1]) == (least, most)
    print_run(lines, Console(file=(shown := io.StringIO()), width=200))
    first, second = (row.count("█") for row in shown.getvalue().splitlines() if "held out" in row)
    assert first < second <= BAR


def _session_of(harness: str, number: int, failed: str = "") -> Episode:
    """Return an episode; `failed`: the kind of its failure."""
    failure = Failure(stage=Status.RUNNING, kind=failed, message=f"a {failed}") if failed else None
    episode = make_episode(f"{harness}-{number}", None if failed else 1.0)
    session = episode.session.model_copy(update={"harness": harness, "failure": failure})
    return episode.model_copy(update={"session": session})


def test_a_harness_of_a_mixture_whose_sessions_all_fail_stops_the_run() -> None:
    """Guards against a mixture that is trained, and tested, in fewer harnesses than it names."""
    failed = [_session_of("codex", number, kind) for number, kind in enumerate(["x_error", "y_error", "y_error"])]
    scored = [_session_of("pi", number) for number in range(3)]
    why = r"step-001: none of 3 sessions of codex has a reward \(2 x y_error, 1 x x_error, e\.g\. 'a y_error'\)"
    with pytest.raises(ConfigError, match=why):
        check_scored([*scored, *failed], "step-001")
    check_scored([*scored, _session_of("codex", 3), *failed], "step-001")
