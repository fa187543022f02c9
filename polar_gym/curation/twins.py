"""Finds the places at which a task's hidden tests can be altered, so that the reference solution fails there."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from polar_gym.curation import CurationError
from polar_gym.curation.alone import alone
from polar_gym.curation.bench import Bench
from polar_gym.curation.solution import as_harness_diff
from polar_gym.curation.validation import GRADING_ERRORS, NO_OP, Verdict, validate
from polar_gym.evaluators import EVALUATORS, verdict
from polar_gym.evaluators.alternatives import MOST
from polar_gym.evaluators.expectations import Expectation, TestFunction, find_tests
from polar_gym.evaluators.parsers import ERROR, FAILED, PASSED
from polar_gym.evaluators.swe import Swe, applies_patch
from polar_gym.evaluators.twins import Twins, copied, copy, names_test
from polar_gym.runtimes.files import UnreadableFileError, read_file
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task

RUNS = 3
COPIES = 2
"""In each of so many runs, so many copies of each place, each with another text (of a number, one neighbour each), must
fail with the reference solution. A place at which some texts pass would fail an honest solution by chance."""
MOST_PLACES = 24
"""The most places of one test that are tried; more are chosen among by chance."""
_OLD = re.compile(r"^(?:--- a/|(?:rename|copy) from )([^\t\n]+)", re.MULTILINE)
"""Matches the name of a file of the base commit in a git patch."""
Place = tuple[str, str, tuple[int, int]]
"""Test file, qualified name of the test, offsets in bytes."""
Key = tuple[str, str, tuple[int, int] | None]
"""The place of a copy; its third part is None for an original."""
MakeCopies = Callable[[bytes, TestFunction, Expectation], list[Callable[[str], bytes]]]
"""(source, test, place) -> for each copy a function: its new name -> its text."""


class Trial:
    """One run of the tests with a copy beside each test for each of its places."""

    def __init__(self, tests: list[str], places: Collection[Place] | None, make: MakeCopies) -> None:
        """Take the ids of the tests, the places (None: all that can be found), and the way to make copies of each."""
        self._tests = tests
        self._places = places
        self._make = make
        self._copies: dict[str, Place] = {}
        """Name of a copy -> the place."""
        self._originals: dict[str, tuple[str, str]] = {}
        """Name of an original -> test file, qualified name of the test."""
        self.bits: dict[Place, int] = {}
        """Place -> `Expectation.bits`."""
        self.sources: Mapping[str, bytes] = {}
        """The test files without copies."""

    def draw(self, sources: Mapping[str, bytes]) -> Twins:
        chance = random.SystemRandom()
        self.sources = sources
        texts: dict[str, bytes] = {}
        for file, source in sources.items():
            tests = [test for test in find_tests(source) if self._is_listed(file, test)]
            texts[file], names = copied(source, [(test, [*self._made(file, source, test)]) for test in tests], chance)
            self._originals |= {name: (file, test) for name, (_, test, span) in names.items() if span is None}
            self._copies |= {name: (file, test, span) for name, (_, test, span) in names.items() if span is not None}
        return Twins(texts, {test: name for name, test in self._originals.items()}, ())

    def _is_listed(self, file: str, test: TestFunction) -> bool:
        return any(names_test(file, test.qualified_name, each) for each in self._tests)

    def _made(self, file: str, source: bytes, test: TestFunction) -> Iterator[tuple[Key, Callable[[str], bytes]]]:
        """Yield the originals and the copies of a test: the place of each, and a function that makes its text.

        There are two originals, so that one fails if the test passes only once in a process.
        """
        for _ in range(2):
            yield (file, test.qualified_name, None), partial(copy, source, test, ())
        places = {(file, test.qualified_name, each.span): each for each in test.expectations}
        chosen = [place for place in places if self._places is None or place in self._places]
        for place in random.SystemRandom().sample(chosen, min(len(chosen), MOST_PLACES)):
            self.bits[place] = places[place].bits
            yield from ((place, make) for make in self._make(source, test, places[place]))

    def failed(self, read: verdict.Verdict, told: Mapping[str, str] | None) -> set[Place]:
        """Return the places whose copies all failed. `told`: the witness's statuses; None where there is no witness."""
        sources = [read.statuses, told] if told is not None else [read.statuses]
        failed = [{test for test, status in source.items() if status in (FAILED, ERROR)} for source in sources]
        others = {
            place
            for name, place in self._copies.items()
            if not all(any(name in test for test in tests) for tests in failed)
        }
        return set(self._copies.values()) - others

    def broken(self, read: verdict.Verdict) -> set[Place]:
        """Return the places of tests that did not pass themselves, with all their parameters."""
        tests = [test for test in self._tests if read.tests.get(test) != PASSED]
        failed = [test for test, status in read.statuses.items() if status in (FAILED, ERROR)]
        originals = {test for name, test in self._originals.items() if any(name in each for each in failed)}
        return {
            place
            for place in self._copies.values()
            if place[:2] in originals or any(names_test(*place[:2], test) for test in tests)
        }


async def with_twins(task: Task, bench: Bench) -> Verdict:
    """Return a task with its twins, and whether it is valid with them. If it is not, it has no twins.

    Where that cannot be tried, the task keeps the twins that it had.
    """
    plain = task.model_copy(update={"twins": {}})
    try:
        twinned = task.model_copy(update={"twins": await find_twins(plain, bench)})
    except (CurationError, *GRADING_ERRORS) as error:
        return Verdict(task=task, problem=str(error) or "timed out")
    verdict = await validate(twinned, bench)
    if not verdict.problem:
        return verdict
    return dataclasses.replace(verdict, task=plain if verdict.tried else task)


async def find_twins(task: Task, bench: Bench) -> dict[str, dict[str, list[list[int]]]]:
    """Return the places of a task's tests for `Task.twins`; empty where no test can be altered.

    A test that has strong places gets only those. Raises `CurationError`, or what grading raises.
    """
    task = await as_harness_diff(task, bench)
    live: set[Place] | None = None
    bits: dict[Place, int] = {}
    sources: Mapping[str, bytes] = {}
    for _ in range(RUNS):
        trial, read, told = await _try(task, bench, task.patch.encode(), live, _altered)
        live, bits, sources = trial.failed(read, told) - trial.broken(read), trial.bits, trial.sources
    shown = await _shown(task, bench, sources)
    hiding = {place for place in live or () if bits[place] and _lines(sources, place).isdisjoint(shown)}
    gold, read, told = await _try(task, bench, task.patch.encode(), hiding, _alone)
    base, base_read, base_told = await _try(task, bench, NO_OP, hiding - gold.failed(read, told), _alone)
    strong = base.failed(base_read, base_told)
    found: dict[str, dict[str, list[list[int]]]] = {}
    for file, name, span in sorted(live or ()):
        mine = {place for place in strong if place[:2] == (file, name)}
        if not mine or (file, name, span) in mine:
            found.setdefault(file, {}).setdefault(name, []).append([*span, bits[file, name, span] if mine else 0])
    return found


async def _shown(task: Task, bench: Bench, files: Collection[str]) -> set[bytes]:
    """Return the lines of test files, and of the files that the test patch makes them of, that the agent can see: code
    of its solution that knows the original line answers right there alone."""
    workspace = bench.context(task, b"").request.runtime.workspace.path
    found = set[bytes]()
    async with bench.sandbox(task, for_agent=not applies_patch(task.eval_script)) as sandbox:
        for file in {*files, *_OLD.findall(task.test_patch)}:
            with contextlib.suppress(FileNotFoundError, UnreadableFileError):
                found.update(map(bytes.strip, (await read_file(sandbox, f"{workspace}/{file}")).splitlines()))
    return found


def _lines(sources: Mapping[str, bytes], place: Place) -> set[bytes]:
    """Return the lines of a place."""
    source, (start, end) = sources[place[0]], place[2]
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    return {*map(bytes.strip, source[first : last if last >= 0 else len(source)].splitlines())}


async def _try(
    task: Task, bench: Bench, diff: bytes, places: Collection[Place] | None, make: MakeCopies
) -> tuple[Trial, verdict.Verdict, Mapping[str, str] | None]:
    """Run the tests with copies of them. Return the trial, the verdict, and the witness's statuses if it began."""
    context = bench.context(task, diff)
    swe = EVALUATORS.make(context.request.evaluator)
    assert isinstance(swe, Swe)
    trial = Trial(task.FAIL_TO_PASS, places, make)
    run = await swe.run(context, trial.draw)
    if isinstance(run, EvaluationResult):
        raise CurationError(f"{task.instance_id}: patch: {run.detail}")
    if run.result.timed_out:
        seconds = context.request.evaluator.timeout_seconds
        raise CurationError(f"{task.instance_id}: with altered tests, the tests take more than {seconds:g} s")
    return trial, await swe.read(context, run), run.testimony.tests if run.testimony.began else None


def _altered(source: bytes, test: TestFunction, place: Expectation) -> list[Callable[[str], bytes]]:
    """Return copies with different texts at the place, where the place has so many. Of a number, the draws show both
    neighbours."""
    chance = random.SystemRandom()
    others = list({place.draw(2, chance)[1] for _ in range(MOST)})
    return [partial(copy, source, test, [(place, others[number % len(others)])]) for number in range(COPIES)]


def _alone(source: bytes, test: TestFunction, place: Expectation) -> list[Callable[[str], bytes]]:
    return [partial(alone, source, test, place)]
