"""Hidden tests decide, as in SWE-bench: all of FAIL_TO_PASS and PASS_TO_PASS must pass with the harness's changes.

In a fresh sandbox the hidden tests are first put in place on the pristine base commit, with canaries (`canary`) and
altered copies of themselves (`twins`) among them. If that fails, the task is at fault, not the harness. Then the
harness's diff is applied without the files that belong to the task (`protected`). The tests run under a witness
(`witness`). A test has passed if every report says so: the runner's log, read by our parsers or by swebench's, and the
witness's record. A resolved diff is graded again, in another sandbox with other copies.

A row has either a `test_command` or an `eval_script`. With a `test_command`, the row's `test_patch` is applied here. An
`eval_script`, as in swebench 5, applies the test patch itself and prints swebench's marks around the tests (module
`eval_script`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from polar_gym.errors import how_to_install
from polar_gym.evaluators import EvaluationContext, EvaluatorError, SuspectError, copies, eval_script, hidden_tests
from polar_gym.evaluators.canary import runs_whole_files, with_canaries
from polar_gym.evaluators.canary_javascript import is_javascript_test
from polar_gym.evaluators.grading import carry
from polar_gym.evaluators.parsers import MISSING, PASSED, get_parser
from polar_gym.evaluators.patch import FileChange
from polar_gym.evaluators.protected import TaskFiles, is_test_module
from polar_gym.evaluators.result import LOG_LIMIT, full_log, how_it_ended, kept_log
from polar_gym.evaluators.swebench_report import END, START, known_parsers
from polar_gym.evaluators.twins import Twins, draw_twins, of_tests, rounds, weak_tests
from polar_gym.evaluators.verdict import Verdict, read_reports
from polar_gym.evaluators.witness import Testimony, Witness, under_witness
from polar_gym.registry import Names, Options
from polar_gym.runtimes import HOME, Command, ExecResult, Sandbox
from polar_gym.schema import EvaluationResult, TaskRequest
from polar_gym.workspaces.history import forget

_ENVIRONMENT = {"PYTHONPYCACHEPREFIX": f"{HOME}/.pycache", "PYTHONNOUSERSITE": "1"}
"""Python looks for compiled files only here, never beside the sources: a compiled file in the diff could replace a
hidden test. They do not lie in /tmp: where that is the machine's, the next sandbox would run the hidden tests of this
one, whose files have the same time, and often the same size."""

_APPLIES = re.compile(r"^\s*git\b.*\bapply\b", re.MULTILINE)


_NEW_FILE = b"\nnew file mode "
"""In a diff, the line of a file that the base commit does not have."""

_WITNESSED = re.compile(r"pytest|py\.test|(?:^|\s|-m)unittest2?(?!\w)|runtests")
"""Matches commands of runners that the witness knows. `tox` is excluded: it runs the tests in another environment."""


def applies_patch(script: str) -> bool:
    """Return whether an eval script applies a patch to the files of the base commit, which must then be there."""
    return bool(_APPLIES.search(script))


def _test_list(value: Any) -> Any:
    """Return test ids as a list; SWE-bench's files hold the JSON text of a list."""
    return json.loads(value) if isinstance(value, str) else value


TestIds = Annotated[list[str], BeforeValidator(_test_list)]


class SweOptions(Options):
    test_command: str = ""
    """Run by `sh -c` in the workspace."""
    eval_script: str = ""
    """Instead of `test_command`: swebench's script, run by bash."""
    FAIL_TO_PASS: TestIds = Field(min_length=1)
    """Tests that the issue is about: each must pass."""
    PASS_TO_PASS: TestIds = Field(default_factory=list)
    """Tests that passed before: each must still pass."""
    test_patch: str = ""
    """Hidden tests, a git patch against the base commit."""
    log_parser: Annotated[str, Names.CODE] = "unittest"
    """`unittest`, `pytest`, `tap`, swebench's `parse_log_...`, or `package.module:function` (log -> id -> status)."""
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    """`fail_only`: a test that the log does not name has passed; for swebench's parsers that see only failures."""
    repo: str = ""
    """The row's repository: swebench's parsers may differ by repository."""
    version: str = ""
    """The row's version: swebench's parsers may differ by version."""
    canary: Literal["auto", "off"] = "auto"
    """`auto`: put tests that must fail among the hidden tests where the command runs whole Python test files."""

    twins: dict[str, dict[str, list[list[int]]]] = Field(default_factory=dict)
    """Test file -> test -> the places at which another text makes the test fail; made by `polar-gym tasks twins`."""
    min_trust: Literal["low", "high"] = "low"
    """`high`: refuse tasks of which forged results of a FAIL_TO_PASS test could go unnoticed (`twins.weak_tests`)."""

    @field_validator("log_parser")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.startswith("parse_log_"):
            if value not in known_parsers():
                why = f"swebench has none of this name; it has {sorted(known_parsers())}"
                if not known_parsers():
                    why = f"swebench is missing; install it with: {how_to_install('swe')}"
                raise ValueError(f"unknown log parser {value!r}: {why}")
        else:
            get_parser(value)
        return value

    @model_validator(mode="after")
    def _one_way_to_run(self) -> Self:
        if bool(self.test_command.strip()) == bool(self.eval_script.strip()):
            raise ValueError("set either test_command or eval_script")
        if self.eval_type == "fail_only" and not self.log_parser.startswith("parse_log_"):
            raise ValueError("eval_type: fail_only needs one of swebench's log parsers")
        if self.eval_script and not (START in self.eval_script and END in self.eval_script):
            raise ValueError(f"eval_script does not print {START!r} and {END!r}")
        if applies_patch(self.eval_script) and not self.test_patch.strip():
            raise ValueError("test_patch is empty, and eval_script applies a patch; set test_patch to this patch, too")
        if self.min_trust == "high" and (weak := weak_tests(self.twins, self.FAIL_TO_PASS)):
            cure = "run: polar-gym tasks twins FILE --out FILE, or let the test expect a checksum"
            raise ValueError(f"min_trust: high, but {weak[0]} hides too few bits; {cure}")
        return self

    @property
    def trust(self) -> Literal["low", "high"]:
        """Return whether a result that the tested code forged would be noticed for every FAIL_TO_PASS test."""
        return "low" if weak_tests(self.twins, self.FAIL_TO_PASS) else "high"

    @property
    def tests(self) -> list[str]:
        return [*self.FAIL_TO_PASS, *self.PASS_TO_PASS]

    @property
    def command(self) -> str:
        """Return the command that runs the tests, without the lines that prepare them."""
        return self.test_command or self.eval_script.partition(START)[2].partition(END)[0]

    @property
    def witnessed(self) -> bool:
        return bool(_WITNESSED.search(self.command)) and "tox" not in self.command


_UNWITNESSED = "the witness heard of no test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the tests: its output, the witness's record, and the tests that were put in."""

    result: ExecResult
    testimony: Testimony
    twins: Twins
    changed: Sequence[str]
    """Hidden test files that changed while the tests ran."""
    steered: Collection[str] = ()
    """Digests of files that steer the tests, before and after the lines of an eval script that changed them."""


class Swe:
    Options = SweOptions
    needs_sandbox = True

    def __init__(self, options: SweOptions) -> None:
        self._options = options
        self._twins = of_tests(options.twins, options.FAIL_TO_PASS)
        self.runs = rounds(self._twins)
        """How often the tests run at most."""

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        if not context.control and not context.diff.strip():
            return self._worthless(context.diff_problem or "the harness changed nothing")
        chance = random.SystemRandom()
        graded, doubt = None, None
        for turn in range(1 if context.control else self.runs):
            run = await self.run(context, lambda sources, turn=turn: draw_twins(sources, self._twins, turn, chance))
            if isinstance(run, EvaluationResult):
                return run
            try:
                again = await self._grade(context, run, turn)
            except SuspectError as error:
                if error.believed is None:
                    raise
                again, doubt = error.believed, doubt or error
            if graded is not None and not again.resolved:
                detail = f"in run {turn + 1}, with other twins: {again.detail}"
                return graded.model_copy(update={"reward": 0.0, "resolved": False, "detail": detail, "log": again.log})
            graded = graded or again
            if not graded.resolved:
                break
        assert graded is not None
        if doubt is not None:
            raise doubt
        return graded

    async def run(
        self, context: EvaluationContext, draw: Callable[[Mapping[str, bytes]], Twins]
    ) -> Run | EvaluationResult:
        """Run the tests once, with the twins that `draw` makes of the test files' sources.

        Return the result instead where the harness's diff does not apply. Raises `EvaluatorError`, `SandboxError`.
        """
        options, workspace = self._options, context.request.runtime.workspace.path
        witness = Witness()
        context.progress.carried = False
        async with context.fresh_sandbox() as sandbox:
            hidden = await hidden_tests.place(sandbox, options.test_patch, apply=not options.eval_script)
            files = TaskFiles(
                owned={change.path.decode(errors="surrogateescape") for change in hidden},
                tests=options.tests,
                command=options.test_command or options.eval_script,
                importable=await hidden_tests.importable_modules(sandbox) if _NEW_FILE in context.diff else (),
            )
            tests = {file for file in files.test_files if is_test_module(file) or is_javascript_test(file)}
            sources = await hidden_tests.read(sandbox, sorted(tests.union(self._twins)))
            try:
                twins = await asyncio.to_thread(draw, sources)
            except ValueError as error:
                raise EvaluatorError(str(error)) from error
            twins = with_canaries(twins, files.with_tests(sources)) if self._wants_canary() else twins
            in_image = [file for file in context.request.runtime.workspace.hidden_files if file in twins.texts]
            if in_image and not applies_patch(options.eval_script):
                await forget(sandbox, workspace, in_image)  # they are written again when the tests are to run
            environment = _ENVIRONMENT
            if not options.eval_script:
                environment = await copies.before_copies(sandbox, workspace, _ENVIRONMENT)
                await hidden_tests.write(sandbox, workspace, twins.texts)
                await witness.place(sandbox)
            if problem := await carry(context, sandbox, files.protects):
                return self._worthless(problem)
            result, steered = await self._execute(
                sandbox, hidden, twins.texts, witness, context.request, files, environment=environment
            )
            testimony = await witness.hear(sandbox, context.progress.counted)
            # An eval script puts the files of the base commit back after the tests.
            changed = [] if options.eval_script else await hidden_tests.changed(sandbox, workspace, twins.texts)
        if context.control:  # without the harness's changes, altered tests pass and fail as they like
            twins = dataclasses.replace(twins, altered=())
        return Run(result=result, testimony=testimony, twins=twins, changed=changed, steered=steered)

    def _wants_canary(self) -> bool:
        options = self._options
        return options.canary == "auto" and options.eval_type == "pass_and_fail" and runs_whole_files(options.command)

    async def _execute(
        self,
        sandbox: Sandbox,
        hidden: Sequence[FileChange],
        texts: Mapping[str, bytes],
        witness: Witness,
        request: TaskRequest,
        files: TaskFiles,
        *,
        environment: Mapping[str, str],
    ) -> tuple[ExecResult, Collection[str]]:
        """Run the tests. An eval script puts the test files and the witness in place itself. Return the output, and
        the `Run.steered`."""
        argv = ["sh", "-c", f"{under_witness(witness.directory)}; {self._options.test_command}"]
        timeout = request.evaluator.timeout_seconds
        command = Command(
            argv=argv,
            environment=environment,
            timeout_seconds=timeout,
            output_limit=LOG_LIMIT,
            untrusted=True,
        )
        if script := self._options.eval_script:
            look = partial(hidden_tests.digests, sandbox, files.steers)
            workspace, patch = request.runtime.workspace.path, self._options.test_patch
            return await eval_script.run(sandbox, script, patch, hidden, workspace, texts, witness, command, look)
        return await sandbox.exec(command), ()

    async def _grade(self, context: EvaluationContext, run: Run, turn: int) -> EvaluationResult:
        """Return the result of a run.

        Raises `SuspectError` if no test ran, if not the workspace was tested, or if tests pass in a doubtful run.

        Reports that only forging can bring about are worth 0, whether or not the grader works without the harness's
        changes. After the first turn only FAIL_TO_PASS counts: the other tests, which may be flaky, have passed.
        """
        options, timeout, result = self._options, context.request.evaluator.timeout_seconds, run.result
        unwitnessed = run.testimony.silent and not options.witnessed and not result.timed_out
        context.progress.doubts.update(run.steered, [_UNWITNESSED] if unwitnessed else [])
        testimony = Testimony() if unwitnessed else run.testimony
        log = full_log(run.result)
        verdict = await self.read(context, dataclasses.replace(run, testimony=testimony), all_tests=not turn)
        ended = f"the tests {how_it_ended(result, timeout)}"
        if files := context.progress.not_counted:
            ended += f"; not counted: {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}"
        if result.timed_out or not verdict.reported:
            problem = ended if result.timed_out else f"{ended} and reported nothing: {log.strip()[-300:]}"
            raise SuspectError(self._result(verdict, problem, log, ended))
        if eval_script.tests_copy(log):
            raise SuspectError(self._result(verdict, copies.PROBLEM, log, ended))
        forged = f"hidden tests changed while they ran: {', '.join(run.changed[:5])}" if run.changed else ""
        forged = forged or (verdict.forged if verdict.resolved else "")
        if forged and not context.control:
            return self._result(verdict, forged, log, ended)
        problem = verdict.problem or testimony.problem
        if options.witnessed and not testimony.began:
            problem = "the tests ran without the witness (a Python that ignores PYTHONPATH, or none?)"
        graded = self._result(verdict, problem, log, ended)
        if problem and (verdict.resolved or (context.control and verdict.ran)):
            raise SuspectError(graded)
        if graded.resolved and (doubts := context.progress.doubts):
            told = [_UNWITNESSED] if doubts == {_UNWITNESSED} else sorted(doubts - {_UNWITNESSED})[:3]
            doubt = f"not so without the harness's changes: {', '.join(told)}"
            raise SuspectError(self._result(verdict, doubt, log, ended), believed=graded)
        return graded

    async def read(self, context: EvaluationContext, run: Run, *, all_tests: bool = True) -> Verdict:
        """Return the verdict on a run; `all_tests`: PASS_TO_PASS counts too. Raises `EvaluatorError`."""
        instance = self._options.model_dump(exclude={"canary", "test_command", "test_patch", "twins", "min_trust"})
        if not all_tests:
            instance["PASS_TO_PASS"] = []
        instance |= {"instance_id": context.request.task_id, "image": ""}
        return await read_reports(instance, full_log(run.result), run.testimony, run.twins)

    def _result(self, verdict: Verdict, problem: str, log: str, ended: str) -> EvaluationResult:
        groups = {"FAIL_TO_PASS": self._options.FAIL_TO_PASS, "PASS_TO_PASS": self._options.PASS_TO_PASS}
        failed = {name: [test for test in group if verdict.tests.get(test) != PASSED] for name, group in groups.items()}
        resolved = verdict.resolved and not problem
        counts = (f"{len(failed[name])} of {len(group)} {name} not passed" for name, group in groups.items())
        return EvaluationResult(
            evaluator="swe",
            reward=float(resolved),
            resolved=resolved,
            tests=verdict.tests,
            components={name.lower(): 1 - len(failed[name]) / len(group) for name, group in groups.items() if group},
            detail=f"all {len(verdict.tests)} tests passed" if resolved else problem or f"{'; '.join(counts)}; {ended}",
            log=kept_log(log),
            trust=self._options.trust,
        )

    def _worthless(self, detail: str) -> EvaluationResult:
        tests = dict.fromkeys(self._options.tests, MISSING)
        trust = self._options.trust
        return EvaluationResult(evaluator="swe", reward=0.0, resolved=False, tests=tests, detail=detail, trust=trust)


EVALUATOR = Swe
