"""Who is to blame when grading fails: the grader only for what fails before the diff is there, or without it too."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from polar_gym.evaluators import EVALUATORS, EvaluationContext, EvaluatorError, hidden_tests
from polar_gym.evaluators.blame import MaskedError
from polar_gym.evaluators.grading import carry
from polar_gym.evaluators.patch import FileChange
from polar_gym.registry import Options
from polar_gym.runtimes import Command, DiskFullError, Sandbox, SandboxError
from polar_gym.schema import EvaluationResult, EvaluatorSpec
from tests.lifecycle.grading_bench import (
    HIDDEN_TESTS,
    INTERVALS,
    PRICES,
    Bench,
    HangingSandbox,
    bench,
    lose_one_read,
    make_patch,
    prices_task,
)

__all__ = ["bench"]

HANG = "printf '\\nwhile True: pass\\n' >> intervals/__init__.py"


class GraderOptions(Options):
    how: str
    when: str


class Grader:
    """Fails as its option says, where its other option says."""

    Options = GraderOptions

    def __init__(self, options: GraderOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        async with context.fresh_sandbox() as sandbox:
            if self._options.when == "before":
                await self._fail()
            assert await carry(context, sandbox) == ""
            made = await sandbox.exec(Command(argv=["test", "-f", "made.txt"]))
            if self._options.when == "always" or made.exit_code == 0:
                await self._fail()
        return EvaluationResult(evaluator="grader", reward=1.0)

    async def _fail(self) -> None:
        if self._options.how == "hangs":
            await asyncio.sleep(600)
        raise {
            "raises": ZeroDivisionError,
            "gives up": EvaluatorError,
            "loses its sandbox": SandboxError,
            "finds the machine's disk full": DiskFullError,
        }[self._options.how]("failed")


@pytest.mark.parametrize("how", ["raises", "gives up", "loses its sandbox", "hangs"])
@pytest.mark.parametrize(("when", "sandboxes"), [("before", 1), ("always", 2), ("with the diff", None)])
async def test_only_what_fails_with_the_diff_alone_is_scored(
    bench: Bench, how: str, when: str, sandboxes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    if how == "hangs":
        monkeypatch.setattr("tests.lifecycle.grading_bench.GRADING_SLACK", 8.0)
    before = bench.sandboxes
    grading = bench.evaluate(INTERVALS, diff, name=f"{__name__}:Grader", how=how, when=when, timeout_seconds=0.5)
    if sandboxes is None:
        result = await grading
        assert result.reward == 0.0
        assert "with the harness's changes, and not without them" in result.detail
    else:
        with pytest.raises(MaskedError):
            await grading
        assert bench.sandboxes - before == sandboxes


async def test_a_sandbox_that_is_lost_once_is_not_the_agents_doing(bench: Bench) -> None:
    """The daemon was restarted: the agent's work is graded again."""
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    LosesOne.left = 1
    result = await bench.evaluate(INTERVALS, diff, name=f"{__name__}:LosesOne")
    assert result.reward == 1.0


async def test_a_full_disk_of_the_machine_masks_also_with_the_diff_alone(bench: Bench) -> None:
    """Guards against a reward of 0 where the disk was full twice, and not while the control run went on."""
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    grader = {"name": f"{__name__}:Grader", "how": "finds the machine's disk full", "when": "with the diff"}
    with pytest.raises(MaskedError, match=r"^failed$"):
        await bench.evaluate(INTERVALS, diff, **grader)


async def test_a_second_try_that_fails_before_the_diff_is_carried_masks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    LosesOne.left = 1
    monkeypatch.setattr(LosesOne, "fails_then", True)
    with pytest.raises(MaskedError, match=r"^no room for a sandbox$"):
        await bench.evaluate(INTERVALS, diff, name=f"{__name__}:LosesOne")


async def test_a_second_run_of_the_tests_that_fails_before_the_diff_is_carried_masks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diff of the first run counted, and the fault was taken for the harness's: the reward was 0."""
    bench.offer_pytest()
    task, place, runs = prices_task(bench.directory), hidden_tests.place, count(1)

    async def place_once(sandbox: Sandbox, test_patch: str, *, apply: bool) -> list[FileChange]:
        if next(runs) == 2:
            raise EvaluatorError("test_patch does not apply to the base commit: timed out")
        return await place(sandbox, test_patch, apply=apply)

    monkeypatch.setattr(hidden_tests, "place", place_once)
    with pytest.raises(MaskedError, match=r"^test_patch does not apply to the base commit: timed out$"):
        await bench.evaluate(task, task.patch.encode())


class LosesOne:
    left = 0
    fails_then = False
    """The next try fails before it carries the diff."""

    def __init__(self, options: Options) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        async with context.fresh_sandbox() as sandbox:
            if type(self).fails_then and not type(self).left and not context.control:
                raise EvaluatorError("no room for a sandbox")
            await carry(context, sandbox)
            if type(self).left and not context.control:
                type(self).left -= 1
                raise SandboxError("gone")
        return EvaluationResult(evaluator="grader", reward=1.0)


JUNIT = "<testsuite><testcase classname='t' name='a'/></testsuite>"


@pytest.mark.parametrize(
    ("end", "options"),
    [
        ("/record", {}),
        ("/test_intervals.py", {}),
        ("/reward", {"name": "test_on_output", "command": "echo 1 > reward", "reward_file": "reward"}),
        ("/r.xml", {"name": "test_on_output", "command": f'echo "{JUNIT}" > r.xml', "junit": "r.xml"}),
    ],
)
async def test_a_sandbox_that_is_lost_while_results_are_read_is_not_the_agents_doing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, end: str, options: dict[str, Any]
) -> None:
    """The loss was taken for a file that the agent had made unreadable: the reward was 0."""
    lost = lose_one_read(monkeypatch, HangingSandbox, end)
    result = await bench.evaluate(INTERVALS, INTERVALS.patch.encode(), **options)
    assert len(lost) == 1
    assert result.reward == 1.0, result.detail


async def test_tests_that_hang_by_themselves_mask(bench: Bench) -> None:
    with pytest.raises(EvaluatorError, match=r"timed out after 2 s; and without the harness's changes: .* timed out"):
        await bench.evaluate(INTERVALS, INTERVALS.patch.encode(), test_command="sleep 60", timeout_seconds=2)


async def test_image_in_which_the_tests_cannot_run_masks(bench: Bench) -> None:
    """Such an image once gave every solution a zero, whatever it was worth."""
    task = prices_task(bench.directory)  # and no pytest
    with pytest.raises(EvaluatorError, match="No module named pytest"):
        await bench.evaluate(task, task.patch.encode())


async def test_command_that_escapes_the_witness_masks(bench: Bench) -> None:
    command = INTERVALS.test_command.replace("python3", "python3 -E")
    with pytest.raises(EvaluatorError, match="without the witness"):
        await bench.evaluate(INTERVALS, INTERVALS.patch.encode(), test_command=command)


async def test_command_that_selects_tests_gets_no_canary(bench: Bench) -> None:
    bench.offer_pytest()
    task = prices_task(bench.directory)
    command = f"{task.test_command} -k discount"
    result = await bench.evaluate(task, task.patch.encode(), test_command=command, PASS_TO_PASS=[])
    assert result.reward == 1.0
    assert "assertRaises" not in result.log


async def test_module_that_is_data_of_the_tests_gets_no_canary(bench: Bench) -> None:
    """A canary in pytest's own `testing/example_scripts` once gave right solutions a zero."""
    bench.offer_pytest()
    tests, sample = "tests/test_prices.py", "samples/test_sample.py"
    files = {**PRICES, sample: "def test_one():\n    pass\n"}
    reads = f"\n\ndef test_sample():\n    assert open('{sample}').read().count('def ') == 2\n"
    hidden = {tests: files[tests] + HIDDEN_TESTS + reads, sample: files[sample] + "\n\ndef test_two():\n    pass\n"}
    task = prices_task(bench.directory, files, test_patch=make_patch(bench.directory, files, hidden))
    to_pass = [*task.FAIL_TO_PASS, f"{tests}::test_sample"]
    result = await bench.evaluate(task, task.patch.encode(), FAIL_TO_PASS=to_pass)
    assert result.reward == 1.0, result.log
    assert "assertRaises" in result.log


async def test_workspace_without_a_diff_is_scored(bench: Bench) -> None:
    for name in ("swe", "test_on_output"):
        more = {} if name == "swe" else {"command": "true"}
        result = await bench.evaluate(INTERVALS, b"", name=name, diff_problem="the diff is longer than 1 byte", **more)
        assert (result.reward, result.detail) == (0.0, "the diff is longer than 1 byte")


# composite ------------------------------------------------------------------------------------------------------------


async def test_composite_reports_each_component(bench: Bench) -> None:
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    components = {
        "made": {"name": "test_on_output", "command": "test -f made.txt"},
        "solved": {"name": "test_on_output", "command": "test -f solved"},
        "done": {"name": "session_completion"},
    }
    result = await bench.evaluate(INTERVALS, diff, name="composite", components=components, weights={"solved": 2})
    assert result.components == {"made": 1.0, "solved": 0.0, "done": 0.0}  # no model call was made
    assert result.reward == 0.25
    assert result.resolved is False
    assert "solved 0: the command exited with 1" in result.detail


async def test_composite_has_no_deadline_beside_those_of_its_components(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Components that were each within their time were cut by that of the whole, and the reward was 0."""
    monkeypatch.setattr("tests.lifecycle.grading_bench.GRADING_SLACK", 0.0)
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    components = {"made": {"name": "test_on_output", "command": "test -f made.txt"}}
    result = await bench.evaluate(INTERVALS, diff, name="composite", components=components, timeout_seconds=0.001)
    assert result.reward == 1.0


async def test_composite_is_masked_as_a_whole(bench: Bench) -> None:
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    components = {
        "made": {"name": "test_on_output", "command": "test -f made.txt"},
        "broken": {"name": "test_on_output", "command": "sleep 60", "timeout_seconds": 0.5},
    }
    with pytest.raises(MaskedError, match="timed out"):
        await bench.evaluate(INTERVALS, diff, name="composite", components=components)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"components": {}}, "components"),
        ({"components": {"a": {"name": "nope"}}}, "unknown evaluator 'nope'"),
        ({"components": {"a": {"name": "test_on_output"}}}, "command"),
        ({"components": {"a": {"name": "session_completion"}}, "weights": {"b": 1}}, "no component is named b"),
        ({"components": {"a": {"name": "session_completion"}}, "weights": {"a": 0}}, "not all 0"),
    ],
)
def test_composite_says_what_is_wrong_with_it(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EVALUATORS.options(EvaluatorSpec.model_validate({"name": "composite", **options}))
