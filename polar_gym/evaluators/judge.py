"""Who is to blame when grading fails.

An agent that could make its grading fail would, if failures were masked, escape a zero at will. So a failure counts
as the grader's only where it happened before the agent's diff was carried into the sandbox, or where it happens without
any diff too: then the same evaluator grades the pristine workspace once more, and nothing but whether it gets to an end
is looked at. That costs a second run only where the first was cut short, or where the tests passed and told the witness
nothing: a runner that the witness does not know tells it nothing without the diff either. If that second run reports no
test at all (the hidden tests import a name that only a solution has), its silence proves nothing: the run is masked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from polar_gym.evaluators import EvaluationContext, Evaluator, EvaluatorError, Progress, SuspectError
from polar_gym.runtimes import SandboxError
from polar_gym.schema import EvaluationResult

log = logging.getLogger(__name__)


class MaskedError(EvaluatorError):
    """The verdict that the grader is at fault, with all that had to be tried for it."""


async def judge(evaluator: Evaluator, context: EvaluationContext, deadline_seconds: float) -> EvaluationResult:
    """What the sandbox was worth; each attempt has the deadline. Raises `MaskedError`."""
    try:
        return await _attempt(evaluator, context, deadline_seconds)
    except MaskedError:
        raise
    except Exception as error:  # noqa: BLE001 - a third party's grader may raise anything
        failure = error
    reason = _say(failure, context, deadline_seconds)
    if context.control or not (context.progress.carried or isinstance(failure, SuspectError)):
        raise MaskedError(reason) from failure
    control = dataclasses.replace(context, diff=b"", diff_problem="", control=True, progress=Progress())
    try:
        await _attempt(evaluator, control, deadline_seconds)
    except Exception as error:
        also = _say(error, control, deadline_seconds)
        raise MaskedError(f"{reason}; and without the agent's changes: {also}") from error
    if isinstance(failure, SandboxError | OSError) and not isinstance(failure, TimeoutError):
        return await _once_more(evaluator, context, control, deadline_seconds)
    return _worth(failure, control) if isinstance(failure, SuspectError) else _worthless(context, reason)


def _worth(suspect: SuspectError, control: EvaluationContext) -> EvaluationResult:
    """Return the result of a suspect run, now that the grader came to its end without the agent's changes."""
    return suspect.unwitnessed if suspect.unwitnessed and control.progress.unwitnessed else suspect.result


async def _once_more(
    evaluator: Evaluator, context: EvaluationContext, control: EvaluationContext, deadline_seconds: float
) -> EvaluationResult:
    """The sandbox was lost with the diff in it, which happens by itself too: only a second time it is the agent's."""
    try:
        return await _attempt(evaluator, context, deadline_seconds)
    except SuspectError as suspect:
        return _worth(suspect, control)
    except Exception as error:  # noqa: BLE001
        return _worthless(context, _say(error, context, deadline_seconds))


async def _attempt(evaluator: Evaluator, context: EvaluationContext, deadline_seconds: float) -> EvaluationResult:
    async with asyncio.timeout(deadline_seconds):
        return await evaluator.evaluate(context)


def _worthless(context: EvaluationContext, reason: str) -> EvaluationResult:
    return EvaluationResult(
        evaluator=context.request.evaluator.name,
        reward=0.0,
        resolved=False,
        detail=f"grading fails with the agent's changes, and not without them: {reason}",
    )


def _say(error: Exception, context: EvaluationContext, deadline_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not done within {deadline_seconds:g} seconds"
    if isinstance(error, EvaluatorError | SuspectError | SandboxError | OSError):
        return str(error)
    name = context.request.evaluator.name
    log.error("session %s: the evaluator %s failed", context.session.session_id, name, exc_info=error)
    return f"{name} raised {error!r}"
