"""Rewards of calls: an evaluator's are checked, ordered, and merged by a composite."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from polar_gym.evaluators import EVALUATORS, EvaluationContext
from polar_gym.evaluators.blame import MaskedError, judge
from polar_gym.registry import Options
from polar_gym.schema import EvaluationResult, EvaluatorSpec
from tests.support.calls import make_call
from tests.support.evaluations import make_context

CALLS = [make_call(1, [1], [2]), make_call(0, [1], [2])]
"""In the order in which they ended."""


class RatingOptions(Options):
    call_rewards: dict[str, float] = Field(default_factory=dict)
    reward: float = 0.5
    style: float = 0.25
    resolved: bool | None = None


class Rating:
    """An evaluator of a third party, which gives the rewards of its options."""

    Options = RatingOptions

    def __init__(self, options: RatingOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        context.progress.carried = True  # a harness's diff is in its sandbox: the harness could be at fault
        rewards = {} if context.control else self._options.call_rewards
        own = self._options
        components = {"style": own.style}
        given = {"components": components, "call_rewards": rewards, "resolved": own.resolved}
        tests = {} if own.resolved is None else {"all": "PASSED" if own.resolved else "FAILED"}
        return EvaluationResult(evaluator="rating", reward=own.reward, tests=tests, **given)


def rating(**call_rewards: float) -> dict[str, Any]:
    return {"name": f"{__name__}:Rating", "call_rewards": call_rewards}


async def grade(**evaluator: Any) -> EvaluationResult:
    spec = EvaluatorSpec.model_validate(evaluator)
    return await judge(EVALUATORS.make(spec), make_context(spec, CALLS), 60)


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"call0": 1.0, "call7": 0.5}, r"rating: call_rewards\['call7'\]=0.5: the session has no such call"),
        ({"call0": float("nan")}, r"rating: call_rewards\['call0'\]=nan: the reward is not a finite number"),
        ({"call1": float("-inf")}, r"rating: call_rewards\['call1'\]=-inf: the reward is not a finite number"),
    ],
)
async def test_a_bad_reward_of_a_call_masks(rewards: dict[str, float], says: str) -> None:
    """Guards against a control run that puts an evaluator's fault down to the harness: reward 0."""
    with pytest.raises(MaskedError, match=says):
        await grade(**rating(**rewards))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"reward": float("nan")}, "rating: reward=nan: not a finite number"),
        ({"style": float("inf")}, r"rating: components\['style'\]=inf: not a finite number"),
    ],
)
async def test_a_reward_that_is_no_number_masks(wrong: dict[str, float], says: str) -> None:
    """Guards against an episode that no server takes, since JSON has no such number: its task never ended."""
    with pytest.raises(MaskedError, match=says):
        await grade(name=f"{__name__}:Rating", **wrong)


async def test_rewards_of_calls_are_in_the_order_of_the_calls() -> None:
    """The advantage of a call is by the rewards of later calls: the order of a dictionary is what tells."""
    result = await grade(**rating(call1=0.0, call0=1.0))
    assert list(result.call_rewards.items()) == [("call0", 1.0), ("call1", 0.0)]
    assert EvaluationResult.from_json(result.to_json()) == result


async def test_a_composite_merges_rewards_of_calls_and_names_all_components() -> None:
    components = {"one": rating(call0=1.0, call1=1.0), "two": rating(call1=0.0), "unweighted": rating(call1=9.0)}
    result = await grade(name="composite", components=components, weights={"one": 3, "unweighted": 0})
    assert result.call_rewards == {"call0": 1.0, "call1": 0.75}
    assert result.components["one"] == 0.5
    assert result.components["two: style"] == 0.25


async def test_a_composite_of_parts_without_a_verdict_has_none() -> None:
    """Guards against SFT on, and pass@k of, samples that no part calls resolved: any reward above 0 counted."""
    poor = await grade(name="composite", components={"a": {**rating(), "reward": 0.05}, "b": rating()})
    assert (poor.reward, poor.resolved) == (0.275, None)


async def test_a_component_without_weight_has_no_verdict() -> None:
    """Guards against a reward of 1 beside a pass@1 of 0: a linter, there for its figure, decided what is resolved."""
    tests, lint = ({**rating(), "reward": float(good), "resolved": good} for good in (True, False))
    result = await grade(name="composite", components={"tests": tests, "lint": lint}, weights={"lint": 0})
    assert (result.reward, result.resolved, result.tests) == (1.0, True, {"tests: all": "PASSED"})
    assert result.components["lint"] == 0.0
