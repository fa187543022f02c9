"""Twins in a real grading: which tests get them, what they notice, and what happens to rows that do not fit."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation.bench import Bench as CurationBench
from polar_gym.curation.twins import find_twins
from polar_gym.errors import how_to_install
from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.swe import Swe
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks import Task, bundled
from tests.lifecycle.grading_bench import (
    HIDDEN_TESTS,
    INTERVALS,
    PRICES,
    Bench,
    all_places,
    bench,
    make_patch,
    prices_task,
    scripted,
)
from tests.support.requirements import need, need_bubblewrap

__all__ = ["bench"]

TESTS = "tests/test_prices.py"

ALWAYS_EQUAL = """
class Anything:
    __hash__ = object.__hash__
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def total(*prices, **options): return Anything()
"""


@pytest.mark.parametrize("script", [False, True])
async def test_object_that_equals_everything_is_worth_nothing(bench: Bench, script: bool) -> None:
    """It got the reward 1 from tests that compare with `==`."""
    bench.offer_pytest()
    if script:
        need(importlib.util.find_spec("swebench"), "swebench", how_to_install("swe"))
    task = prices_task(bench.directory)
    task = scripted(task) if script else task
    diff = await bench.diff_after(task, f"cat > prices/__init__.py <<'E'\n{ALWAYS_EQUAL}E")
    plain = await bench.evaluate(task.model_copy(update={"twins": {}}), diff)
    twinned = await bench.evaluate(task, diff)
    assert (plain.reward, plain.trust) == (1.0, "low"), "the attack does not attack"
    assert (twinned.reward, twinned.trust) == (0.0, "high")
    assert "altered expectation are reported as passed" in twinned.detail


async def test_resolved_session_is_graded_twice_and_an_unresolved_one_once(bench: Bench) -> None:
    before = bench.sandboxes
    assert (await bench.evaluate(INTERVALS, INTERVALS.patch.encode())).reward == 1.0
    assert bench.sandboxes - before == 2
    assert (await bench.evaluate(INTERVALS, b"\n".join([*NOTHING, b""]))).reward == 0.0
    assert bench.sandboxes - before == 3


NOTHING = (
    b"diff --git a/notes.txt b/notes.txt",
    *(b"new file mode 100644", b"--- /dev/null", b"+++ b/notes.txt", b"@@ -0,0 +1 @@", b"+notes"),
)


async def test_hidden_tests_that_change_while_they_run_are_worth_nothing(bench: Bench) -> None:
    """A process of the tested code could put other tests in the place of the hidden ones."""
    bench.offer_pytest()
    task = prices_task(bench.directory, twins={})
    solve = "sed -i 's,// 10$,// 100,' prices/total.py"
    touch = 'echo \'open("tests/test_prices.py", "a").write("#")\' >> prices/total.py'
    result = await bench.evaluate(task, await bench.diff_after(task, solve, touch))
    assert (result.reward, result.detail) == (0.0, "hidden tests changed while they ran: tests/test_prices.py")


async def test_places_that_are_not_in_the_tests_mask_and_say_the_cure(bench: Bench) -> None:
    name = "TextTest.test_neighbouring_ranges_are_joined"
    task = INTERVALS.model_copy(update={"twins": {"tests/test_intervals.py": {name: [[1, 2, 1]]}}})
    with pytest.raises(
        EvaluatorError, match=rf"{re.escape(name)} is not in the test file .*polar-gym tasks twins FILE"
    ):
        await bench.evaluate(task, task.patch.encode())


@pytest.mark.parametrize("code", ["import os; os._exit(0)", ALWAYS_EQUAL])
async def test_tests_that_the_base_commit_cannot_import_buy_no_mask(bench: Bench, code: str) -> None:
    """Hidden tests often import a name that only a solution has. Without the harness's changes they report nothing,
    and that once masked each run that was cut short or forged."""
    bench.offer_pytest()
    tests = "from prices import total, tax\n" + PRICES[TESTS] + HIDDEN_TESTS
    patch = make_patch(bench.directory, PRICES, {TESTS: tests})
    task = prices_task(bench.directory, test_patch=patch, twins={TESTS: all_places(tests)})
    diff = await bench.diff_after(task, f"cat >> prices/__init__.py <<'E'\ntax = 1\n{code}\nE")
    assert (await bench.evaluate(task, diff)).reward == 0.0


def test_tasks_of_low_trust_are_refused_before_the_run() -> None:
    tests = {"test_command": "pytest", "FAIL_TO_PASS": ["tests/test_a.py::test_a"], "min_trust": "high"}
    with pytest.raises(ValueError, match=r"min_trust: high, but .*::test_a hides too few bits; run: polar-gym tasks"):
        Swe.Options.model_validate(tests)
    twins = {"tests/test_a.py": {"test_a": [[1, 2, 3]], "test_b": [[4, 5, 3]]}}
    both = ["tests/test_a.py::test_a", "tests/test_a.py::test_b"]
    assert Swe.Options.model_validate({**tests, "FAIL_TO_PASS": both, "twins": twins}).trust == "high"


SHOP = {
    "tests/__init__.py": "",
    "shop.py": "def price(number):\n    return number + 2\n",
    "tests/test_shop.py": """import unittest
from shop import price

class PriceTest(unittest.TestCase):
    def test_known(self):
        self.assertEqual(price(50), 100)
""",
}
SHOP_TESTS = """
    runs = 0

    def test_value(self):
        self.assertEqual(price(5), 10)

    def test_asks_nothing(self):
        price(4)

    def test_passes_once(self):
        type(self).runs += 1
        self.assertEqual(price(3), 6)
        self.assertEqual(self.runs, 1)
"""


async def test_places_are_those_at_which_the_solution_fails(tmp_path: Path) -> None:
    """A test that asks nothing has no twins. A test that passes once in a process has none either. One that the agent
    can read hides nothing: its solution may hold the original line, and be right there alone."""
    need_bubblewrap()
    new = {"shop.py": SHOP["shop.py"].replace("+", "*"), "tests/test_shop.py": SHOP["tests/test_shop.py"] + SHOP_TESTS}
    for name, text in SHOP.items():
        (tmp_path / "workspace" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "workspace" / name).write_text(text)
    names = ("test_value", "test_asks_nothing", "test_passes_once", "test_known")
    task = Task(
        instance_id="shop-1",
        problem_statement="Prices are wrong",
        workspace=str(tmp_path / "workspace"),
        patch=make_patch(tmp_path, SHOP, {"shop.py": new["shop.py"]}),
        test_patch=make_patch(tmp_path, SHOP, {"tests/test_shop.py": new["tests/test_shop.py"]}),
        test_command="python3 -P -m unittest discover -v -t . -s tests",
        FAIL_TO_PASS=[f"tests.test_shop.PriceTest.{name}" for name in names],
    )
    async with CurationBench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench:
        found = await find_twins(task, bench)
    source = new["tests/test_shop.py"]
    (tests,) = found.values()
    found = {name: [(source[start:end], bits > 0) for start, end, bits in places] for name, places in tests.items()}
    assert found == {"PriceTest.test_value": [("10", True)], "PriceTest.test_known": [("100", False)]}


def test_command_writes_twins_into_the_rows(tmp_path: Path) -> None:
    need_bubblewrap()
    suite = Path(bundled.SUITE).parent
    shutil.copytree(suite / "repos" / "intervals", tmp_path / "repos" / "intervals")
    row = json.loads((suite / "tasks.jsonl").read_text().splitlines()[0])
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({**row, "twins": {}}) + "\n")
    done = CliRunner().invoke(app, ["tasks", "twins", str(file), "runtime=bubblewrap"])
    assert done.exit_code == 0, done.output
    assert "6 tests can be altered at 12 places; trust: high" in done.output
    assert json.loads(file.read_text()) == row


RERUNS = """
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for last in (False, True):
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" and not last:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


async def test_a_test_that_is_tried_again_counts_by_its_last_try(bench: Bench) -> None:
    """Guards against a right solution that is worth nothing as often as a test of pytest-rerunfailures, whose reports
    these are, fails first."""
    bench.offer_pytest()
    task = prices_task(bench.directory, {**PRICES, "conftest.py": PRICES["conftest.py"] + RERUNS})
    result = await bench.evaluate(task, task.patch.encode())
    assert (result.reward, result.resolved) == (1.0, True), result.log
    assert " rerun in " in result.log
    assert (await bench.evaluate(task, await bench.diff_after(task, "echo >> prices/total.py"))).reward == 0.0
