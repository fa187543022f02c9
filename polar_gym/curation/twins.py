"""Finds the places at which a task's hidden tests can be altered, so that the reference solution fails there."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from polar_gym.curation.bench import Bench
from polar_gym.curation.errors import CurationError
from polar_gym.curation.validation import GRADING_ERRORS, Verdict, validate
from polar_gym.evaluators import EVALUATORS, verdict
from polar_gym.evaluators.expectations import TestFunction, find_tests
from polar_gym.evaluators.parsers import ERROR, FAILED, PASSED
from polar_gym.evaluators.swe import Swe
from polar_gym.evaluators.twins import Copy, Edit, Twins, new_name, rewritten
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task

RUNS = 3
"""How often the reference solution must fail at a place, each time with another text."""
MOST_PLACES = 24
"""The most places of one test that are tried; more are chosen among by chance."""

Place = tuple[str, str, tuple[int, int]]
"""Test file, qualified name of the test, offsets in bytes."""


class Trial:
    """One run with each test beside copies of it that are altered in one place each."""

    def __init__(self, tests: list[str], live: set[Place] | None) -> None:
        """Take the ids of the tests, and the places to alter; None: all that can be found."""
        self._tests = tests
        self._live = live
        self._copies: dict[str, Place] = {}
        """Name of an altered copy -> the place."""

    def draw(self, sources: Mapping[str, bytes]) -> Twins:
        chance = random.SystemRandom()
        texts: dict[str, bytes] = {}
        originals: dict[str, str] = {}
        for file, source in sources.items():
            made: list[tuple[TestFunction, list[Copy]]] = []
            for test in find_tests(source):
                if any(_names(file, test.qualified_name, each) for each in self._tests):
                    copies = self._altered(file, test, chance)
                    original = Copy(new_name(test, chance), ())
                    originals[original.name] = test.name
                    made.append((test, chance.sample([original, *copies], len(copies) + 1)))
            if made:
                texts[file] = rewritten(source, made)
        return Twins(texts, originals, ())

    def _altered(self, file: str, test: TestFunction, chance: random.Random) -> list[Copy]:
        copies = []
        places = [(each, (file, test.qualified_name, (each.start, each.end))) for each in test.expectations]
        chosen = [pair for pair in places if self._live is None or pair[1] in self._live]
        for expectation, place in chance.sample(chosen, min(len(chosen), MOST_PLACES)):
            edit: Edit = (expectation, expectation.draw(2, chance)[1])
            copy = Copy(new_name(test, chance), [edit])
            self._copies[copy.name] = place
            copies.append(copy)
        return copies

    def live(self, read: verdict.Verdict, told: Mapping[str, str] | None) -> set[Place]:
        """Return the places whose copy failed, of tests that passed themselves.

        `told`: the witness's statuses; None where there is no witness.
        """
        sources = [read.statuses, told] if told is not None else [read.statuses]
        failed = [{test for test, status in source.items() if status in (FAILED, ERROR)} for source in sources]
        broken = [test for test in self._tests if read.tests.get(test) != PASSED]
        return {
            place
            for name, place in self._copies.items()
            if all(any(name in test for test in tests) for tests in failed)
            and not any(_names(place[0], place[1], test) for test in broken)
        }


async def with_twins(task: Task, bench: Bench) -> Verdict:
    """Return a task with its twins, and whether it is valid with them. With a problem, it has no twins."""
    plain = task.model_copy(update={"twins": {}})
    try:
        twinned = task.model_copy(update={"twins": await find_twins(plain, bench)})
    except (CurationError, *GRADING_ERRORS) as error:
        return Verdict(task=plain, problem=str(error) or "timed out")
    verdict = await validate(twinned, bench)
    return dataclasses.replace(verdict, task=plain) if verdict.problem else verdict


async def find_twins(task: Task, bench: Bench) -> dict[str, dict[str, list[list[int]]]]:
    """Return the places of a task's tests for `Task.twins`; empty where no test can be altered.

    Raises `CurationError`, or what grading raises.
    """
    context = bench.context(task, task.patch.encode())
    swe = EVALUATORS.make(context.request.evaluator)
    assert isinstance(swe, Swe)
    live: set[Place] | None = None
    for _ in range(RUNS):
        trial = Trial(task.FAIL_TO_PASS, live)
        run = await swe.run(context, trial.draw)
        if isinstance(run, EvaluationResult):
            raise CurationError(f"{task.instance_id}: patch: {run.detail}")
        if run.result.timed_out:
            seconds = context.request.evaluator.timeout_seconds
            raise CurationError(f"{task.instance_id}: with altered tests, the tests take more than {seconds:g} s")
        live = trial.live(await swe.read(context, run), run.testimony.tests if run.testimony.began else None)
    found: dict[str, dict[str, list[list[int]]]] = {}
    for file, name, span in sorted(live or ()):
        found.setdefault(file, {}).setdefault(name, []).append(list(span))
    return found


def _names(file: str, qualified_name: str, test: str) -> bool:
    """Return whether a test id names this test of this file."""
    words = [*qualified_name.split("."), PurePosixPath(file).stem]
    return all(re.search(rf"\b{re.escape(word)}\b", test) for word in words)
