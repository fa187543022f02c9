"""Hidden tests decide, as in SWE-bench: all of FAIL_TO_PASS and PASS_TO_PASS must pass with the harness's changes.

In a fresh sandbox the hidden tests are first put in place on the pristine base commit, with canaries among them
(`canary`). If that fails, the task is at fault, not the harness. Then the harness's diff is applied without the files
that belong to the task (`protected`). The tests run under a witness (`witness`). A test has passed if every report says
so: the runner's log, read by our parsers or by swebench's, and the witness's record.

A row has either a `test_command` or an `eval_script`. With a `test_command`, the row's `test_patch` is applied here. An
`eval_script`, as in swebench 5, applies the test patch itself and prints swebench's marks around the tests.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from polar_gym.evaluators import EvaluationContext, EvaluatorError, SuspectError
from polar_gym.evaluators.canary import Canary, make_canary, runs_whole_files
from polar_gym.evaluators.grading import carry
from polar_gym.evaluators.parsers import MISSING, get_parser
from polar_gym.evaluators.patch import unquoted
from polar_gym.evaluators.protected import TaskFiles, is_test_module
from polar_gym.evaluators.result import full_log, how_it_ended, kept_log
from polar_gym.evaluators.swebench_report import END, EXIT_CODE, INSTALL, START, known_parsers
from polar_gym.evaluators.verdict import Verdict, read_reports
from polar_gym.evaluators.witness import Testimony, Witness
from polar_gym.registry import Names, Options
from polar_gym.runtimes import Command, ExecResult, Sandbox
from polar_gym.runtimes.files import write_files
from polar_gym.schema import EvaluationResult

_ENVIRONMENT = {"PYTHONPYCACHEPREFIX": "/tmp/polar-gym-pycache", "PYTHONNOUSERSITE": "1"}
"""Python looks for compiled files only here, never beside the sources: a compiled file in the diff could replace a
hidden test."""

_UNDER_WITNESS = 'export PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}"; shift; exec "$@"'

_PLACE_HIDDEN_TESTS = """
set -e
git() { command git -c safe.directory='*' "$@"; }
cat > /tmp/polar-gym-test.patch
[ "$1" = list ] || git apply --whitespace=nowarn /tmp/polar-gym-test.patch
export GIT_INDEX_FILE=/tmp/polar-gym-index
git read-tree HEAD
git apply --cached --whitespace=nowarn /tmp/polar-gym-test.patch
git diff-index --cached --name-only --no-renames HEAD
rm /tmp/polar-gym-test.patch
"""
"""Applies the test patch and lists the paths that the patch touches, old names of renamed files included."""

_WITNESSED = re.compile(r"pytest|py\.test|unittest|runtests")
"""Matches commands of runners that the witness knows. `tox` is excluded: it runs the tests in another environment."""


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
    """`unittest`, `pytest`, swebench's `parse_log_...`, or `package.module:function` (log -> test id -> status)."""
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    """`fail_only`: a test that the log does not name has passed; for swebench's parsers that see only failures."""
    repo: str = ""
    """The row's repository: swebench's parsers may differ by repository."""
    version: str = ""
    """The row's version: swebench's parsers may differ by version."""
    canary: Literal["auto", "off"] = "auto"
    """`auto`: put tests that must fail among the hidden tests where the command runs whole Python test files."""

    @field_validator("log_parser")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.startswith("parse_log_"):
            if value not in known_parsers():
                why = f"swebench has none of this name; it has {sorted(known_parsers())}"
                raise ValueError(
                    f"unknown log parser {value!r}: {why if known_parsers() else f'install it: {INSTALL}'}"
                )
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
        return self

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


class Swe:
    Options = SweOptions
    needs_sandbox = True

    def __init__(self, options: SweOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        if not context.control and not context.diff.strip():
            return self._worthless(context.diff_problem or "the harness changed nothing")
        options, timeout = self._options, context.request.evaluator.timeout_seconds
        witness = Witness()
        async with context.fresh_sandbox() as sandbox:
            owned = await self._place_hidden_tests(sandbox)
            files = TaskFiles(owned=owned, tests=options.tests, command=options.command)
            canary, modules = self._canary(files.test_files)
            if canary is not None and options.test_command:
                await _shell(sandbox, "the canaries cannot be put into the tests", canary.script(modules))
            await witness.place(sandbox)
            if problem := await carry(context, sandbox, files.protects):
                return self._worthless(problem)
            script = options.test_command or self._eval_script(context, canary, modules)
            result = await self._run(sandbox, script, witness, timeout)
            testimony = await witness.hear(sandbox, context.progress.counted)
        return await self._grade(context, result, testimony, canary)

    async def _place_hidden_tests(self, sandbox: Sandbox) -> set[str]:
        """Apply the test patch to the pristine workspace, or leave that to the eval script. Return the paths in it."""
        options = self._options
        if not options.test_patch.strip():
            return set()
        listed = await _shell(
            sandbox,
            "test_patch does not apply to the base commit",
            _PLACE_HIDDEN_TESTS,
            "list" if options.eval_script else "apply",
            stdin=options.test_patch.encode(),
        )
        return {unquoted(name).decode(errors="surrogateescape") for name in listed.splitlines()}

    def _canary(self, test_files: set[str]) -> tuple[Canary | None, list[str]]:
        """Return a canary and the files that it goes into."""
        options = self._options
        modules = sorted(file for file in test_files if is_test_module(file))
        wanted = options.canary == "auto" and options.eval_type == "pass_and_fail" and runs_whole_files(options.command)
        return (make_canary(), modules) if wanted and modules else (None, [])

    def _eval_script(self, context: EvaluationContext, canary: Canary | None, modules: list[str]) -> str:
        """Return swebench's script with the canaries before the tests and a line that prints the tests' exit code."""
        lines = []
        for line in self._options.eval_script.strip().splitlines():
            if START in line and canary is not None:
                workspace = shlex.quote(context.request.runtime.workspace.path)
                lines += ["{ set +x; } 2> /dev/null", f"(cd {workspace}\n{canary.script(modules)}\n)", "set -x"]
            if END in line:
                lines += ["POLAR_GYM_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $POLAR_GYM_EXIT_CODE"']
            else:
                lines.append(line)
        return "\n".join(lines) + "\n"

    async def _run(self, sandbox: Sandbox, script: str, witness: Witness, timeout: float) -> ExecResult:
        run = ["sh", "-c", script]
        if self._options.eval_script:
            await write_files(sandbox, {f"{witness.directory}/eval.sh": script})
            run = ["bash", "-c", 'exec bash "$1" 2>&1', "bash", f"{witness.directory}/eval.sh"]
        argv = ["sh", "-c", _UNDER_WITNESS, "sh", witness.directory, *run]
        return await sandbox.exec(Command(argv=argv, environment=_ENVIRONMENT, timeout_seconds=timeout))

    async def _grade(
        self, context: EvaluationContext, result: ExecResult, testimony: Testimony, canary: Canary | None
    ) -> EvaluationResult:
        """Return the result of a run. Raises `SuspectError` if no test ran, or if tests pass in a doubtful run."""
        options, timeout = self._options, context.request.evaluator.timeout_seconds
        log = full_log(result)
        instance = options.model_dump(exclude={"canary", "test_command", "test_patch"})
        context.progress.unwitnessed = testimony.silent and not options.witnessed and not result.timed_out
        if context.progress.unwitnessed:
            testimony = Testimony()
        verdict = await read_reports(
            {**instance, "instance_id": context.request.task_id, "image": ""}, log, testimony, canary
        )
        problem = verdict.problem or testimony.problem
        if options.witnessed and not testimony.began:
            problem = "the tests ran without the witness (a Python that ignores PYTHONPATH, or none?)"
        ended = f"the tests {how_it_ended(result, timeout)}"
        if files := context.progress.not_counted:
            ended += f"; not counted: {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}"
        if result.timed_out or not verdict.any_status:
            problem = ended if result.timed_out else f"{ended} and reported nothing: {log.strip()[-300:]}"
            raise SuspectError(self._result(verdict, problem, log, ended))
        graded = self._result(verdict, problem, log, ended)
        if problem and (verdict.resolved or context.control):
            raise SuspectError(graded)
        if graded.resolved and context.progress.unwitnessed:
            doubt = "the witness heard of no test, which it does without the harness's changes"
            raise SuspectError(self._result(verdict, doubt, log, ended), unwitnessed=graded)
        return graded

    def _result(self, verdict: Verdict, problem: str, log: str, ended: str) -> EvaluationResult:
        groups = {"FAIL_TO_PASS": self._options.FAIL_TO_PASS, "PASS_TO_PASS": self._options.PASS_TO_PASS}
        failed = {name: [test for test in group if test not in verdict.passed] for name, group in groups.items()}
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
        )

    def _worthless(self, detail: str) -> EvaluationResult:
        tests = dict.fromkeys(self._options.tests, MISSING)
        return EvaluationResult(evaluator="swe", reward=0.0, resolved=False, tests=tests, detail=detail)


async def _shell(sandbox: Sandbox, problem: str, script: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Return the output of a script that prepares a pristine sandbox. Raises `EvaluatorError`."""
    result = await sandbox.exec(Command(argv=["sh", "-c", script, "sh", *arguments], stdin=stdin))
    if result.exit_code != 0:
        message = "timed out" if result.timed_out else result.stderr.decode(errors="replace").strip()
        raise EvaluatorError(f"{problem}: {message}")
    return result.stdout


EVALUATOR = Swe
