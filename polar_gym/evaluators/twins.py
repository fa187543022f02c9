"""Puts tests with altered expectations, the *twins*, among the hidden tests: only the host knows which tests are right.

Tested code runs in the process that judges it, so it can make any test pass. It cannot know which tests ought to pass.
Each twinned test stands in its file in up to 16 copies, under random names and in random order. One copy is the
original. Each other copy expects something else in at least one place (`expectations`). All combinations of a few
places and texts occur, so that no copy is at the centre of the others. A run counts only if every original passes and
every other copy fails. Code that forges results, empties tests, or answers with objects that equal everything makes
the altered copies pass as well. A guess is right once in 16 for each test and run, and a resolved run is graded again
with other copies (`rounds`).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import PurePosixPath
from string import ascii_lowercase
from typing import TypeVar

from polar_gym.evaluators.alternatives import MOST
from polar_gym.evaluators.expectations import Expectation, TestFunction, find_tests
from polar_gym.evaluators.parsers import ERROR, FAILED, PASSED

Places = Mapping[str, Sequence[Sequence[int]]]
"""Qualified name of a test -> the places in its file at which another text makes the test fail. A place is two offsets
in bytes, and how many bits of its original the place hides (`Expectation.bits`). Where the base commit passes, a place
hides nothing: code that behaves as the base commit does would tell the original."""
TwinPlaces = Mapping[str, Places]
"""Test file -> its places; made by `curation.twins`."""
Edit = tuple[Expectation, str]
K = TypeVar("K")
Copied = tuple[TestFunction, Sequence[tuple[K, Callable[[str], bytes]]]]
"""A test, and for each of its copies a key and a function: the name of the copy -> its text."""

MOST_COPIES = 128
"""How many copies of tests a run has at most, as long as 32 tests or fewer are twinned."""
ENOUGH_BITS = 8
"""The trust is high if each FAIL_TO_PASS test hides so many bits in all runs of a grading together. Code that solves
all tests but one guesses at that one only: the bits of the others do not protect it."""
FEWEST = 4
"""How many copies a test has at least, where its expectations have so many texts."""
MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Twins:
    """The test files of one run, and the names of the tests that were put into them."""

    texts: Mapping[str, bytes]
    originals: Mapping[tuple[str, str], str]
    """Test file and qualified name of a test -> the name of its original."""
    altered: Collection[str]
    """Names of the copies that must fail."""
    canaries: Collection[str] = ()
    """Names of other tests that must fail, as far as the runner knows them (`canary`)."""

    def reported(self, test: str) -> str:
        """Return the id under which a listed test is reported: its original has another name."""
        for (file, qualified_name), name in self.originals.items():
            if names_test(file, qualified_name, test):
                head, bracket, parameters = test.partition("[")
                *_, last = re.finditer(rf"\b{re.escape(qualified_name.rpartition('.')[2])}\b", head)
                return f"{head[: last.start()]}{name}{head[last.end() :]}{bracket}{parameters}"
        return test

    def check(self, statuses: Mapping[str, str], listed: Mapping[str, str], source: str) -> tuple[str, str]:
        """Return what in the reports of `source` only forging can bring about, and what they lack; "" for nothing.

        `listed`: listed test -> the id under which it is reported. Originals and altered copies are held to the same
        rules: whatever makes an altered copy look failed without its own assertion, done to all copies, makes the
        original look failed.
        """
        found, longer = self._statuses(statuses)
        failed = {name for name, each in found.items() if {FAILED, ERROR} & {*each}}
        passed = {name for name, each in found.items() if PASSED in each}
        strays = [test for test, name in listed.items() if test in statuses and name != test]
        strays += [longer] if longer else []
        called = passed.difference(failed).intersection(self.altered)
        missing = len({*self.altered} - failed)
        forged = silent = ""
        if canaries := passed.intersection(self.canaries):
            forged = f"a test that must fail is reported as passed by {source}: {min(canaries)}"
        elif strays:
            forged = f"a test that is not among the hidden ones is reported by {source}: {strays[0][:200]}"
        elif failed.intersection(self.originals.values()):
            forged = f"a test is reported as passed and failed by {source}"
        elif called:
            forged = f"{len(called)} tests with an altered expectation are reported as passed by {source}"
        if self.canaries and failed.isdisjoint(self.canaries):
            silent = f"a test that must fail is not reported by {source}"
        elif missing:
            silent = f"{missing} tests with an altered expectation are not reported by {source}"
        return forged, silent

    def _statuses(self, statuses: Mapping[str, str]) -> tuple[dict[str, list[str]], str]:
        """Return the statuses of each test, and an id that holds a test's name as a part of a longer word."""
        found: dict[str, list[str]] = {name: [] for name in (*self.originals.values(), *self.altered, *self.canaries)}
        names = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        anywhere, whole = re.compile(names), re.compile(rf"(?<!\w)(?:{names})(?!\w)")  # both linear in an id's length
        longer = ""
        for test, status in statuses.items() if found else ():
            words = whole.findall(test)
            for word in words:
                found[word].append(status)
            if len(anywhere.findall(test)) > len(words):
                longer = test
        return found, longer


def names_test(file: str, qualified_name: str, test: str) -> bool:
    """Return whether a test id names this test of this file.

    An id of pytest is the file, from where pytest ran, and the name. Other ids hold the words of the name and the file.
    """
    head = test.partition("[")[0]
    path, *names = head.split("::")
    if names:
        return ".".join(names) == qualified_name and f"/{file}".endswith(f"/{path}")
    words = [*qualified_name.split("."), PurePosixPath(file).stem]
    # Most ids name another test, and looking for a text is much faster than looking for a word.
    return all(word in head for word in words) and all(re.search(rf"\b{re.escape(word)}\b", head) for word in words)


def rounds(places: TwinPlaces) -> int:
    """Return how often a resolved session is graded: until each place had its turn, and a guess is unlikely."""
    tests = [each for file in places.values() for each in file.values()]
    longest = max(map(len, tests), default=0)
    wanted = [ENOUGH_BITS / bits for bits in _bits_of_tests(places).values() if bits]
    return min(math.ceil(max(2, longest / math.log2(MOST), *wanted)), MOST_ROUNDS) if tests else 1


def of_tests(places: TwinPlaces, tests: Sequence[str]) -> TwinPlaces:
    """Return the places of those tests that these ids name."""
    return {
        file: {name: found for name, found in each.items() if any(names_test(file, name, test) for test in tests)}
        for file, each in places.items()
    }


def weak_tests(places: TwinPlaces, tests: Sequence[str]) -> list[str]:
    """Return those of these test ids whose forged results could go unnoticed: without twins, or with too few bits."""
    used = of_tests(places, tests)
    bits, runs = _bits_of_tests(used), rounds(used)
    fewest = {test: min((bits[name] for name in bits if names_test(*name, test)), default=0) for test in tests}
    return [test for test in tests if fewest[test] * runs < ENOUGH_BITS]


def _bits_of_tests(places: TwinPlaces) -> dict[tuple[str, str], int]:
    """Return test file and name -> how many bits the test hides in each run at least."""
    tests = {(file, name): found for file, each in places.items() for name, found in each.items()}
    return {name: _bits(found, _doublings(len(tests))) for name, found in tests.items()}


def _bits(places: Sequence[Sequence[int]], doublings: int) -> int:
    """Return how many bits a test hides at least if its copies are doubled so often, as `_variants` does it."""
    hidden = sorted(bits for _, _, bits in places)[:doublings]
    share, more = divmod(doublings, max(1, len(hidden)))
    return sum(min(bits, share + (at < more)) for at, bits in enumerate(hidden))


def _doublings(tests: int) -> int:
    """Return how often each of so many tests doubles its copies in a run; 0 where a run leaves tests out."""
    return int(math.log2(min(MOST, MOST_COPIES / max(1, tests)))) if tests <= MOST_COPIES // FEWEST else 0


def draw_twins(sources: Mapping[str, bytes], places: TwinPlaces, turn: int, chance: random.Random) -> Twins:
    """Return twins for the tests in `places`. Raises `ValueError` where a place is not in its file.

    `turn` counts the runs of one grading: each run begins with places that the runs before it did not have.
    """
    chosen = [(file, name) for file, tests in places.items() for name in tests]
    chance.shuffle(chosen)
    chosen = chosen[: MOST_COPIES // FEWEST]
    most = 2 ** _doublings(len(chosen))
    texts = dict(sources)
    originals: dict[tuple[str, str], str] = {}
    altered: set[str] = set()
    for file in places:
        known = {test.qualified_name: test for test in find_tests(sources.get(file, b""))}
        tests: list[Copied[tuple[str, bool]]] = []
        for name in (name for at, name in chosen if at == file):
            variants = _variants(_live(known.get(name), places[file][name], f"{file}: {name}"), most, turn, chance)
            makes = (partial(copy, sources[file], known[name], edits) for edits in variants)
            tests.append((known[name], [((name, number > 0), make) for number, make in enumerate(makes)]))
        if tests:
            texts[file], names = copied(sources[file], tests, chance)
            originals |= {(file, name): new for new, (name, is_altered) in names.items() if not is_altered}
            altered.update(new for new, (_, is_altered) in names.items() if is_altered)
    return Twins(texts, originals, altered)


def copied(source: bytes, tests: Iterable[Copied[K]], chance: random.Random) -> tuple[bytes, dict[str, K]]:
    """Return a test file with copies in place of tests, in random order, and the name of each copy -> its key."""
    parts, at, names = [], 0, dict[str, K]()
    for test, makes in sorted(tests, key=lambda each: each[0].start):
        texts = []
        for key, make in makes:
            name = f"{test.name}_{''.join(chance.choices(ascii_lowercase, k=8))}"
            names[name] = key
            texts.append(make(name))
        parts += [source[at : test.start], *chance.sample(texts, len(texts))]
        at = test.end
    return b"".join([*parts, source[at:]]), names


def copy(source: bytes, test: TestFunction, edits: Iterable[Edit], name: str) -> bytes:
    """Return the text of a copy of a test, under a new name."""
    changes = [(test.name_start, test.name_start + len(test.name.encode()), name)]
    changes += [(*place.span, text) for place, text in edits]
    parts, at = [], test.start
    for start, end, text in sorted(changes):
        parts += [source[at:start], text.encode()]
        at = end
    last = source[at : test.end]
    return b"".join([*parts, last, b"" if last.endswith(b"\n") else b"\n", b"\n"])


def _live(test: TestFunction | None, places: Sequence[Sequence[int]], name: str) -> list[Expectation]:
    known = {each.span: each for each in test.expectations} if test is not None else {}
    if any((start, end) not in known for start, end, _ in places):
        raise ValueError(f"twins: {name} is not in the test file as the row says; run: polar-gym tasks twins FILE")
    return [known[start, end] for start, end, _ in places]


def _variants(places: Sequence[Expectation], copies: int, turn: int, chance: random.Random) -> list[list[Edit]]:
    """Return the edits of at most `copies` copies, all combinations of some texts at some places; the first is right.

    The number of copies is a power of two.
    """
    first = turn * int(math.log2(MOST)) % len(places)
    chosen: list[Expectation] = []
    for place in [*places[first:], *places[:first]]:
        if all(place.end <= other.start or other.end <= place.start for other in chosen):
            chosen.append(place)
    chosen = chosen[: int(math.log2(copies))]
    sizes = [2] * len(chosen)
    while math.prod(sizes) * 2 <= copies:
        able = [at for at, place in enumerate(chosen) if sizes[at] * 2 <= place.capacity]
        if not able:
            break
        sizes[min(able, key=sizes.__getitem__)] *= 2
    texts = [place.draw(size, chance) for place, size in zip(chosen, sizes, strict=True)]
    return [list(zip(chosen, combination, strict=True)) for combination in product(*texts)]
