"""Decides who is at fault when grading fails.

If every failed grading were masked, a harness that makes its grading fail could escape a reward of 0 at will. Therefore
the grader is at fault in two cases only. Either the failure happened before the harness's diff was carried into the
sandbox, or it happens without the diff too. For the second case, the same evaluator grades the pristine workspace
(the control run), and only whether it comes to its end counts. The harness never is at fault for a full disk of the
machine (`DiskFullError`): the runtime says so only where the sandbox did not fill it.

The control run is needed only where the first run was cut short, or where the tests passed and a doubt is left
(`Progress.doubts`): they told the witness nothing, or files that steer the tests changed before they ran. A runner that
the witness does not know tells the witness nothing without the diff either. If the control run reports no test at all
(the hidden tests import a name that only a solution has), its silence proves nothing, and the run is masked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from operator import attrgetter

from polar_gym.evaluators import EvaluationContext, Evaluator, EvaluatorError, Progress, SuspectError
from polar_gym.runtimes import DiskFullError, SandboxError
from polar_gym.schema import EvaluationResult

log = logging.getLogger(__name__)


class MaskedError(EvaluatorError):
    """The verdict that the grader is at fault, with the outcome of each attempt."""


def may_be_chance(failure: BaseException | None) -> bool:
    """Return whether a grading failed as it may by chance: its sandbox was lost, or the machine failed otherwise."""
    return isinstance(failure, SandboxError | OSError) and not isinstance(failure, TimeoutError)


async def judge(evaluator: Evaluator, context: EvaluationContext, deadline_seconds: float) -> EvaluationResult:
    """Return the grade of a session. Raises `MaskedError`.

    Each attempt to grade has the deadline, as many times as the evaluator says that it runs the tests (`runs`). With
    `judges_parts`, the evaluator's parts have deadlines of their own, and the whole has none.
    """
    deadline_seconds *= getattr(evaluator, "runs", 1)
    graded = await _grade(evaluator, context, deadline_seconds)
    if isinstance(graded, EvaluationResult):
        return graded
    control = dataclasses.replace(context, diff=b"", diff_problem="", control=True, progress=Progress())
    try:
        await _attempt(evaluator, control, deadline_seconds)
    except Exception as error:
        reason, also = _say(graded, context, deadline_seconds), _say(error, control, deadline_seconds)
        raise MaskedError(f"{reason}; and without the harness's changes: {also}") from error
    if may_be_chance(graded):  # the harness is at fault only if that happens twice
        graded = await _grade(evaluator, context, deadline_seconds)
        if isinstance(graded, EvaluationResult):
            return graded
    if isinstance(graded, SuspectError):
        same = context.progress.doubts <= control.progress.doubts
        return graded.believed if graded.believed and same else graded.result
    reason = _say(graded, context, deadline_seconds)
    return EvaluationResult(
        evaluator=context.request.evaluator.name,
        reward=0.0,
        resolved=False,
        detail=f"grading fails with the harness's changes, and not without them: {reason}",
    )


async def _grade(
    evaluator: Evaluator, context: EvaluationContext, deadline_seconds: float
) -> EvaluationResult | Exception:
    """Return the evaluator's result, or a failure for which the harness may be at fault. Raises `MaskedError` for any
    other failure."""
    context.progress.carried = False
    try:
        return await _attempt(evaluator, context, deadline_seconds)
    except MaskedError:
        raise
    except Exception as error:
        blamable = context.progress.carried or isinstance(error, SuspectError)
        if context.control or not blamable or isinstance(error, DiskFullError):
            raise MaskedError(_say(error, context, deadline_seconds)) from error
        return error


async def _attempt(evaluator: Evaluator, context: EvaluationContext, deadline_seconds: float) -> EvaluationResult:
    """Return the evaluator's result, with rewards of calls in the order of the calls. Raises `MaskedError` for a number
    that is not finite: JSON has none, so that the episode could not be delivered."""
    async with asyncio.timeout(None if getattr(evaluator, "judges_parts", False) else deadline_seconds):
        result = await evaluator.evaluate(context)
    named = {"reward": result.reward, **{f"components[{name!r}]": each for name, each in result.components.items()}}
    if wrong := {name: value for name, value in named.items() if not math.isfinite(value)}:
        told = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise MaskedError(f"{result.evaluator}: {told}: not a finite number")
    rewards, order = result.call_rewards, [call.call_id for call in sorted(context.calls, key=attrgetter("index"))]
    for call_id, reward in rewards.items():
        if call_id not in order or not math.isfinite(reward):
            why = "the reward is not a finite number" if call_id in order else "the session has no such call"
            raise MaskedError(f"{result.evaluator}: call_rewards[{call_id!r}]={reward!r}: {why}")
    return result.model_copy(update={"call_rewards": {name: rewards[name] for name in order if name in rewards}})


def _say(error: Exception, context: EvaluationContext, deadline_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not done within {deadline_seconds:g} seconds"
    if isinstance(error, EvaluatorError | SuspectError | SandboxError | OSError):
        return str(error)
    name = context.request.evaluator.name
    log.error("session %s: the evaluator %s failed", context.session.session_id, name, exc_info=error)
    return f"{name} raised {error!r}"
