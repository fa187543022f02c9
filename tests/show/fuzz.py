"""Search for inputs that break a property test, with other random inputs each round: `make show-fuzz`.

In CI the property tests try the same inputs in every run (`tests/conftest.py`); this program explores. It runs the
tests that hypothesis marks, as pytest collects them, until the time is over. An input that breaks a test is kept as an
`@example` above the test: every later run tries it first, also in CI, and no database that depends on the version of
hypothesis is needed. An input that no expression can spell (of `st.data()`, or of a state machine) is only in the
figures, with the seed that finds it again. A test that has failed is left out of the rounds that follow. A property
test draws its cases instead of being parametrised: hypothesis writes parameters into an example, and then refuses the
example.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.show.result import Result, make_parser, parse

(HOLDS,) = LAWS = ("every property test holds for every input that was tried",)
PATCHES = Path(".hypothesis/patches")
"""Where hypothesis, if it has libcst, leaves a patch with the examples of each run that failed."""
SAID = 4000
"""The characters of a failure's report that the figures keep: its end, with the input."""
_IMPORT = "from hypothesis import example"
_RAN = re.compile(r"(\d+) (?:passing|failing|invalid)\b")
"""In hypothesis's statistics of a test."""


@dataclass(eq=False)
class Round:
    """A pytest plugin: runs what hypothesis marks, in a random order and as long as there is time, and counts."""

    seed: int
    deadline: float
    """On the clock of `time.monotonic`. No test begins after it."""
    collected: int = 0
    """Property tests that there are."""
    tests: set[str] = field(default_factory=set)
    """Those that ran."""
    examples: int = 0
    """Inputs that were tried."""
    failures: dict[str, str] = field(default_factory=dict)
    """Test -> the end of its report."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected = len(items)
        random.Random(self.seed).shuffle(items)  # where time runs out, no test is always among those that are left

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self.deadline else None  # True: pytest takes the test for run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if call.when == "call":
            self.tests.add(item.nodeid)
        if report.failed:
            self.failures[item.nodeid] = report.longreprtext[-SAID:]
        if call.when == "teardown":
            self.examples += sum(map(int, _RAN.findall(getattr(item, "hypothesis_statistics", ""))))
        return report


def run(seed: int, deadline: float, places: list[str]) -> Round:
    """Run one round of all property tests at these places. Exits where pytest cannot run them."""
    this = Round(seed, deadline)
    options = ["-m", "hypothesis", "--hypothesis-profile=laws", f"--hypothesis-seed={seed}"]
    options += ["-q", "--no-header", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-r", ""]
    code = pytest.main([*options, *places], plugins=[this])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"pytest could not run the property tests of {' '.join(places)}: {code!r}")
    return this


def explore(seed: int, seconds: float, most: float, places: list[str]) -> list[Round]:
    """Run rounds with consecutive seeds, until the time is over, there were enough, or every test has failed."""
    deadline = time.monotonic() + seconds
    rounds = [run(seed, deadline, places)]
    holding = rounds[0].tests - rounds[0].failures.keys()
    while time.monotonic() < deadline and len(rounds) < most and holding:
        rounds.append(run(rounds[-1].seed + 1, deadline, sorted(holding)))
        holding -= rounds[-1].failures.keys()
    return rounds


def keep_examples() -> list[str]:
    """Put the examples that hypothesis wrote down above their tests, and return the files that this changed."""
    changed = set()
    for patch in sorted(PATCHES.glob("*.patch")):
        applied = subprocess.run(["git", "apply", patch], capture_output=True, text=True, check=False)
        if applied.returncode != 0:
            print(f"could not be applied: git apply {patch}\n{applied.stderr}")  # noqa: T201
            continue
        changed |= set(re.findall(r"^\+\+\+ \./(.*)$", patch.read_text(encoding="utf-8"), re.MULTILINE))
    for file in map(Path, changed):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"^from hypothesis import .*\bexample\b", text, re.MULTILINE):
            file.write_text(text.replace("\nfrom hypothesis ", f"\n{_IMPORT}\nfrom hypothesis ", 1), encoding="utf-8")
    if changed:
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "--quiet", "--select", "I", "--fix", *changed], check=False)
        subprocess.run([*ruff, "format", "--quiet", *changed], check=False)
    return sorted(changed)


def main() -> int:
    parser = make_parser("fuzz", __doc__, quick="all that begins after 40 seconds")
    parser.add_argument("places", nargs="*", default=["tests"], metavar="PATH", help="tests, as pytest names them")
    parser.add_argument("--seconds", type=float, default=300, help="how long (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="how often at most (default: while there is time)")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: by chance)")
    options = parse(parser, quick={"seconds": 40.0})
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    result = Result("fuzz", LAWS, options)
    shutil.rmtree(PATCHES, ignore_errors=True)
    rounds = explore(seed, options.seconds, options.rounds or math.inf, options.places)
    kept = keep_examples()
    failures = [
        {"test": test, "seed": each.seed, "said": said} for each in rounds for test, said in each.failures.items()
    ]
    result.check(HOLDS, [f"{failed['test']} (again by --hypothesis-seed={failed['seed']})" for failed in failures])
    result.figures = figures = {
        "seed": seed,
        "rounds": len(rounds),
        "tests": len(set[str]().union(*(each.tests for each in rounds))),
        "tests_collected": rounds[0].collected,
        "examples": sum(each.examples for each in rounds),
        "failures": failures,
        "examples_added_to": kept,
    }
    tests = f"{figures['tests']} of {figures['tests_collected']} property tests"
    said = [f"{figures['examples']} inputs of {tests} in {result.seconds} s, first seed {seed}"]
    said += [f"an @example was added to {file}: commit it with the cure" for file in kept]
    print("", *said, sep="\n")  # noqa: T201
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
