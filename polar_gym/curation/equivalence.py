"""Tells whether a wrong patch behaves as the solution does, as far as altered hidden tests can show a difference.

Copies of the hidden tests get other literals, inputs as well as expectations. The same copies run with the solution and
with the patch. A patch counts as equivalent only if each copy passes or fails as it does with the solution, with the
same message. A copy counts only if it runs under the witness and does the same in two runs of the solution.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from polar_gym.curation.bench import Bench
from polar_gym.curation.wrong import WrongPatch
from polar_gym.evaluators import EVALUATORS
from polar_gym.evaluators.expectations import Expectation, find_tests
from polar_gym.evaluators.result import full_log
from polar_gym.evaluators.swe import Swe
from polar_gym.evaluators.twins import Copied, Edit, Twins, copied, copy, names_test
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task

TESTS, COPIES = 48, 768
"""How many tests are altered at most, and how many copies they have together. A copy has one to three other literals.
"""
ENOUGH, FEWEST = 20, 5
"""How many copies must be compared: `ENOUGH`, or all where there are fewer, but at least `FEWEST`."""

_HEADING = re.compile(r"_+ (?!_ )|(?:FAIL|ERROR): |Ran \d+ tests? |=+ ")
"""Matches the start of a line above a failure in a log of pytest or unittest, and of a line below the last failure."""
_MESSAGE = re.compile(r"E  .*|[\w.]+: .*|[-+?] .*| {1,2}(?!File )[^ |].*")
"""Matches lines of a failure's message. The lines of a traceback differ where only the code differs."""
_NOISE = re.compile(r"0x[0-9a-f]+|\bline \d+|\.py:\d+|/tmp/\S+|\b\d+\.\d+ ?m?s\b")


async def equivalent(task: Task, bench: Bench, patches: Sequence[WrongPatch]) -> dict[WrongPatch, str]:
    """Return the patches that behave as the solution does, each with examples. Raises what a grading raises."""
    if not patches:
        return {}
    task = comparable(task)
    gold, again = [await _outcomes(task, bench, task.patch.encode()) for _ in range(2)]
    steady = {change: outcome for change, outcome in gold.items() if again.get(change) == outcome}
    if len(steady) < max(FEWEST, min(ENOUGH, len(gold))):
        return {}
    others = {patch: await _outcomes(task, bench, patch.diff) for patch in patches}
    examples = (" ".join(each.split())[:120] for each in [*steady][:: len(steady) // 3 + 1])
    inputs = f"{len(steady)} altered tests, e.g. {'; '.join(examples)}"
    return {patch: inputs for patch, other in others.items() if steady.items() <= other.items()}


def comparable(task: Task) -> Task:
    """Return the task with tests whose logs can be compared.

    Messages list sets in the order of hashes. To show the source of a failure, pytest parses the whole file again.
    """
    field = "test_command" if task.test_command else "eval_script"
    variables = "export PYTHONHASHSEED=0 PYTEST_ADDOPTS=--tb=native"
    return task.model_copy(update={field: f"{variables}\n{getattr(task, field)}"})


async def _outcomes(task: Task, bench: Bench, diff: bytes) -> dict[str, str]:
    """Return what each copy did with a patch, under the copy's change; {} where the run does not end by itself."""
    changes: dict[str, str] = {}
    context = bench.context(task, diff)
    swe = EVALUATORS.make(context.request.evaluator)
    assert isinstance(swe, Swe)
    run = await swe.run(context, lambda sources: _altered(task, sources, changes))
    if isinstance(run, EvaluationResult) or run.result.timed_out or not changes:
        return {}
    return {changes[name]: told for name, told in outcomes(changes, run.testimony.tests, full_log(run.result)).items()}


def outcomes(names: Iterable[str], statuses: Mapping[str, str], log: str) -> dict[str, str]:
    """Return the statuses and messages of each test in a log of pytest or unittest whose id has one of these names."""
    name = re.compile("|".join(names))
    told: dict[str, str] = {}
    for test, status in sorted(statuses.items()):
        if found := name.search(test):
            told[found[0]] = f"{told.get(found[0], '')}{test} {status}\n"
    current = ""
    for line in log.splitlines():
        if _HEADING.match(line):
            current = found[0] if (found := name.search(line)) else ""
        elif current in told and _MESSAGE.fullmatch(line):
            told[current] += _NOISE.sub("", line) + "\n"
    return told


def _altered(task: Task, sources: Mapping[str, bytes], changes: dict[str, str]) -> Twins:
    """Return altered copies of the hidden tests, always the same ones for a task.

    Puts into `changes`, under the name of each copy, the test and its other literals in one line.
    """
    chance = random.Random(task.instance_id)
    tests = [(file, test) for file in sorted(sources) for test in find_tests(sources[file], all_literals=True)]
    tests = [each for each in tests if each[1].expectations]
    chance.shuffle(tests)
    tests.sort(
        key=lambda each: not any(names_test(each[0], each[1].qualified_name, name) for name in task.FAIL_TO_PASS)
    )
    tests, texts = tests[:TESTS], dict(sources)
    for file in sources:
        copies: list[Copied[str]] = []
        for test in (test for at, test in tests if at == file):
            made: dict[str, list[Edit]] = {}
            written = {place: sources[file][place.start : place.end].decode() for place in test.expectations}
            literals = {place: repr(ast.literal_eval(f"({text})")) for place, text in written.items()}
            for _ in range(COPIES // len(tests)):
                places = chance.sample(test.expectations, min(chance.randint(1, 3), len(literals)))
                edits: list[Edit] = [(place, _other_text(place, literals, chance)) for place in places]
                made[f"{test.name}: " + ", ".join(f"{literals[place]} -> {text}" for place, text in edits)] = edits
            copies.append((test, [(each, partial(copy, sources[file], test, made[each])) for each in made]))
        texts[file], names = copied(sources[file], copies, chance)
        changes |= names
    return Twins(texts, {}, ())


def _other_text(place: Expectation, texts: Mapping[Expectation, str], chance: random.Random) -> str:
    """Return another text for a literal: a drawn one, a piece of the old one, or another literal of the test."""
    value = ast.literal_eval(texts[place])
    others = place.draw(place.capacity, chance)
    others += [text for text in texts.values() if type(ast.literal_eval(text)) is type(value)]
    if isinstance(value, str | bytes):
        cut = chance.randrange(len(value) + 1)
        others += [repr(value[:cut]), repr(value[cut:]), repr(value * 2)]
    return chance.choice([text for text in others if ast.literal_eval(text) != value])
