"""Which episodes are worth imitating, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from polar_gym.chat import has_media
from polar_gym.evaluators.parsers import PASSED, SKIPPED
from polar_gym.record import Record
from polar_gym.schema import Episode, EvaluatorSpec, Trace


class Filters(Record):
    """The conditions under which a dataset accepts episodes. The filters of a directory never change."""

    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Accept by reward. None: accept by tests; all of FAIL_TO_PASS and PASS_TO_PASS must have passed."""
    allow_scripted: bool = False
    """Accept also episodes of a scripted policy, which is not a model."""
    allow_truncated: bool = True
    """Accept also episodes that a budget ended after the work was done."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Leave out traces with more tokens than this."""


def refusal(episode: Episode, filters: Filters) -> str | None:
    """Return in a word or two why an episode is not accepted. None: the episode is accepted."""
    if episode.engine.scripted and not filters.allow_scripted:
        return "scripted"
    if episode.session.failure is not None or episode.reward is None:
        return "failed"
    if episode.truncated and not filters.allow_truncated:
        return "truncated"
    if filters.min_reward is not None:
        return None if episode.reward >= filters.min_reward else "reward"
    return None if _resolved(episode) else "unresolved"


def trace_refusal(trace: Trace, filters: Filters) -> str | None:
    """Return why a trace of an accepted episode is left out. None: the trace becomes a row."""
    if not trace.trainable_tokens:
        return "nothing trainable"
    if filters.max_tokens is not None and len(trace.prompt_ids) + len(trace.response_ids) > filters.max_tokens:
        return "too long"
    if any(has_media(message) for message in trace.messages):
        return "multimodal"
    return None


def _resolved(episode: Episode) -> bool:
    """Return whether the task is resolved and every single test that the evaluator reports has passed.

    `resolved` alone must not be trusted. `test_on_output` takes a skipped test for one that passed.
    """
    evaluation = episode.evaluation
    if evaluation is None or evaluation.resolved is not True:
        return False
    may_skip = tuple(_names_of_tests_on_output(evaluation.evaluator, episode.request.evaluator))
    return all(
        status == PASSED or (status == SKIPPED and test.startswith(may_skip))
        for test, status in evaluation.tests.items()
    )


def _names_of_tests_on_output(evaluator: str, spec: EvaluatorSpec, beginning: str = "") -> Iterator[str]:
    """Yield the beginnings of the names of tests that are `test_on_output`'s, also as a part of a `composite`."""
    if evaluator == "test_on_output":
        yield beginning
    for name, each in spec.options.get("components", {}).items() if evaluator == "composite" else ():
        part = EvaluatorSpec.model_validate(each)
        yield from _names_of_tests_on_output(part.name, part, f"{beginning}{name}: ")
