"""Measures how often a task rewards a wrong patch.

The reference solution must resolve the task `GATE` times. Then mutants of the solution, parts of the solution and
cheats are tried: first all in one sandbox, then those that pass the listed tests by a grading. Patches that behave as
the solution does are set aside. What a sandbox tells about the solution is listed beside the figure.
"""

from __future__ import annotations

from collections.abc import Callable

from polar_gym.curation.bench import Bench
from polar_gym.curation.equivalence import compared, differing_functions, record
from polar_gym.curation.leaks import leaks, open_helpers
from polar_gym.curation.trial import PLACE, trial
from polar_gym.curation.wrong import WrongPatch, wrong_patches
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.patch import file_changes
from polar_gym.tasks import Audit, Task

GATE = 3
"""How often the reference solution must resolve the task."""

Say = Callable[[str], None]


class AuditError(ConfigError):
    """The task cannot be audited. The message says why."""


async def audit(task: Task, bench: Bench, say: Say) -> Audit:
    """Return the figures of a task. Raises `AuditError`, and what a grading raises."""
    if not task.patch.strip():
        raise AuditError("patch: is empty, so there is no reference solution to vary")
    for number in range(1, GATE + 1):
        say(f"grading the reference solution, {number} of {GATE}")
        gold = await bench.evaluate(task, task.patch.encode())
        if not gold.resolved:
            raise AuditError(f"the reference solution does not resolve it: {gold.detail}")
    say("looking for leaks")
    findings = await leaks(task, bench)
    async with trial(bench, task) as tried:
        files = [change.path.decode(errors="replace") for change in file_changes(tried.gold)]
        right = await tried.sources(tried.gold, files)
        say("making wrong patches")
        wrong = [each for each in await wrong_patches(tried, right) if differing_functions(right, each.sources) != {}]
        survivors: list[WrongPatch] = []
        for number, each in enumerate(wrong, start=1):
            say(f"wrong patch {number} of {len(wrong)}, {len(survivors)} so far pass the listed tests")
            if not tried.quick or await tried.passes(each.diff):
                survivors.append(each)
        say(f"grading {len(survivors)} of {len(wrong)} wrong patches")
        accepted = [each for each in survivors if await _is_rewarded(task, bench, each)]
        say("comparing the behaviour of what is rewarded with the solution's")
        if tried.quick and right:
            await record(tried, right)
            findings += open_helpers(task, (await tried.read(f"{PLACE}/modules")).splitlines())
        same: dict[WrongPatch, str] = {}
        for each in accepted:
            functions = differing_functions(right, each.sources)
            if functions and (inputs := await compared(tried, each.diff, functions)):
                same[each] = inputs
    return Audit(
        rewarded=len(accepted) - len(same),
        tried=len(wrong) - len(same),
        accepted=[each.name for each in accepted if each not in same],
        equivalent=[f"{each.name} (the same: {inputs})" for each, inputs in same.items()],
        findings=findings,
    )


async def _is_rewarded(task: Task, bench: Bench, wrong: WrongPatch) -> bool:
    try:
        return (await bench.evaluate(task, wrong.diff)).resolved is True
    except EvaluatorError:  # masked: no reward
        return False
