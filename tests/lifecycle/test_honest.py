"""Correct solutions other than the reference solutions are rewarded: a guard of the grader raises no false alarm."""

import pytest

from tests.lifecycle.grading_bench import BUNDLED, bench
from tests.support.honest import solutions

__all__ = ["bench"]


@pytest.mark.parametrize("task", BUNDLED.values(), ids=lambda task: task.repo)
def test_every_bundled_task_has_three_other_solutions(task):
    others = solutions(task)
    assert [solution.name for solution in others] == ["1", "2", "3"]
    assert task.patch.encode() not in [solution.diff for solution in others]


@pytest.mark.parametrize(("name", "number"), [("intervals", "2"), ("durations", "2"), ("texttable", "3")])
async def test_other_solution_is_rewarded(bench, name, number):
    """The first leaves files that steer runners, the others print while the tests run."""
    task = BUNDLED[name]
    (solution,) = [each for each in solutions(task) if each.name == number]
    result = await bench.evaluate(task, solution.diff)
    assert (result.reward, result.detail) == (1.0, f"all {len(result.tests)} tests passed")
