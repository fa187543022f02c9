"""Measures how often a task rewards a wrong patch.

The reference solution must resolve the task `GATE` times. Then mutants of the solution, parts of the solution and
cheats are tried: first all in one sandbox, then those that pass the listed tests by a grading. Patches that behave as
the solution does are set aside. What a sandbox tells about the solution is listed beside the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.equivalence import equivalent
from polar_gym.curation.leaks import leaks, open_helpers
from polar_gym.curation.solution import as_harness_diff, unresolved
from polar_gym.curation.trial import passes, sources
from polar_gym.curation.wrong import WrongPatch, wrong_patches
from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.blame import may_be_chance
from polar_gym.tasks import Audit, Task

GATE = 3
"""How often the reference solution must resolve the task."""


async def audit(task: Task, bench: Bench, say: Callable[[str], None]) -> Audit:
    """Return the figures of a task. Raises `CurationError`, and what a grading raises."""
    if not task.patch.strip():
        raise CurationError("patch: is empty, so there is no reference solution to vary")
    given, task = task, await as_harness_diff(task, bench)
    for number in range(1, GATE + 1):
        say(f"grading the reference solution, {number} of {GATE}")
        gold = await bench.evaluate(task, task.patch.encode())
        if not gold.resolved:
            raise CurationError(unresolved(given, task, gold))
    say("looking for leaks")
    findings = await leaks(task, bench)
    solution = task.patch.encode()
    async with bench.sandbox(task) as sandbox:
        findings += await open_helpers(sandbox, task)
        started = time.monotonic()
        quick = await passes(sandbox, task, solution)
        seconds = 10 + 5 * (time.monotonic() - started)
        before, right = [await sources(sandbox, task, diff) for diff in (b"", solution)]
        wrong = wrong_patches(task, before, right)
        survivors: list[WrongPatch] = []
        for number, each in enumerate(wrong, start=1):
            say(f"wrong patch {number} of {len(wrong)}, {len(survivors)} so far pass the listed tests")
            if not quick or await passes(sandbox, task, each.diff, seconds):
                survivors.append(each)
        if quick and not await passes(sandbox, task, solution, seconds):
            survivors = wrong  # a patch left something behind that made later ones fail
    say(f"grading {len(survivors)} of {len(wrong)} wrong patches")
    accepted: list[WrongPatch] = []
    masked: list[str] = []
    for each in survivors:
        try:
            if (await bench.evaluate(task, each.diff)).resolved:
                accepted.append(each)
        except EvaluatorError as error:  # only where the machine failed is it unknown whether the patch is rewarded
            if may_be_chance(error.__cause__):
                masked.append(f"{each.name} ({error})")
    if masked:
        findings.append(f"not graded, and not in the figure: {len(masked)} wrong patches, e.g. {masked[0]}")
        if len(masked) == len(survivors):
            raise CurationError(f"{findings[-1]}; put this right, and audit the task again")
    say("comparing the behaviour of what is rewarded with the solution's")
    same = await equivalent(task, bench, accepted)
    return Audit(
        rewarded=len(accepted) - len(same),
        tried=len(wrong) - len(masked) - len(same),
        accepted=[each.name for each in accepted if each not in same],
        equivalent=[f"{each.name} (the same: {inputs})" for each, inputs in same.items()],
        findings=findings,
    )
