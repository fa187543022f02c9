"""Several evaluators together: the weighted mean of their rewards, each reported as a component.

The reward of a call is the weighted mean over those evaluators that rewarded the call.

The evaluators grade one after the other, in separate sandboxes, each within its own time. If one of them is broken and
the harness is not at fault, the episode is masked. A mean over the rest would be a different reward from one episode to
the next.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS, EvaluationContext, Progress
from polar_gym.evaluators.blame import judge
from polar_gym.registry import Options
from polar_gym.schema import EvaluationResult, EvaluatorSpec


class CompositeOptions(Options):
    components: dict[str, EvaluatorSpec] = Field(min_length=1)
    """Name of the component -> its evaluator, with the same options as outside of a composite."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Name of a component -> its share; default 1. They are divided by their sum."""

    @field_validator("components")
    @classmethod
    def _sound(cls, components: dict[str, EvaluatorSpec]) -> dict[str, EvaluatorSpec]:
        for name, spec in components.items():
            try:
                EVALUATORS.options(spec)
            except LookupError as error:
                raise ValueError(f"{name}: {error}") from error
        return components

    @model_validator(mode="after")
    def _weighed(self) -> Any:
        if unknown := self.weights.keys() - self.components.keys():
            raise ValueError(f"weights: no component is named {', '.join(sorted(unknown))}")
        if any(weight < 0 for weight in self.weights.values()) or not sum(map(self.weight, self.components)):
            raise ValueError("weights: they must not be negative, and not all 0")
        return self

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        return [tool for spec in self.components.values() for tool in getattr(EVALUATORS.options(spec), "tools", ())]

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)


class Composite:
    Options = CompositeOptions
    judges_parts = True

    def __init__(self, options: CompositeOptions) -> None:
        self._options = options
        self._evaluators = {name: EVALUATORS.make(spec) for name, spec in options.components.items()}
        environments = [each for one in self._evaluators.values() if (each := getattr(one, "environment", None))]
        if len(environments) > 1:
            raise ConfigError(
                f"components: {len(environments)} of them bring an environment; a session has one at most"
            )
        self.environment = next(iter(environments), None)

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        results: dict[str, EvaluationResult] = {}
        for name, spec in self._options.components.items():
            request = context.request.model_copy(update={"evaluator": spec})
            own = dataclasses.replace(context, request=request, progress=Progress())
            deadline = request.runtime.init_timeout_seconds + spec.timeout_seconds
            results[name] = await judge(self._evaluators[name], own, deadline)
        weights = {name: self._options.weight(name) for name in results}
        reward = sum(weights[name] * result.reward for name, result in results.items()) / sum(weights.values())
        trusts = {result.trust for result in results.values()}
        counted = {name: result for name, result in results.items() if weights[name]}
        verdicts = [result.resolved for result in counted.values() if result.resolved is not None]
        return EvaluationResult(
            evaluator="composite",
            reward=reward,
            resolved=all(verdicts) and reward > 0 if verdicts else None,
            tests={
                f"{name}: {test}": status for name, result in counted.items() for test, status in result.tests.items()
            },
            components={name: result.reward for name, result in results.items()}
            | {
                f"{name}: {part}": value
                for name, result in results.items()
                for part, value in result.components.items()
            },
            detail="; ".join(f"{name} {result.reward:g}: {result.detail}" for name, result in results.items()),
            log="\n".join(f"=== {name} ===\n{result.log}" for name, result in results.items() if result.log),
            trust="low" if "low" in trusts else "high" if trusts == {"high"} else None,
            call_rewards=self._call_rewards(results),
        )

    def _call_rewards(self, results: Mapping[str, EvaluationResult]) -> dict[str, float]:
        given: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, result in results.items():
            if weight := self._options.weight(name):
                for call_id, reward in result.call_rewards.items():
                    given[call_id].append((weight, reward))
        return {
            call_id: sum(weight * reward for weight, reward in pairs) / sum(weight for weight, _ in pairs)
            for call_id, pairs in given.items()
        }


EVALUATOR = Composite
