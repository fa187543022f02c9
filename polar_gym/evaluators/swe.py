"""Hidden tests decide, as in SWE-bench: all of FAIL_TO_PASS and PASS_TO_PASS must pass on what the agent left.

In a fresh sandbox the hidden tests are put in place first, on the pristine base commit: if that fails the task is
broken, not the agent. Then the agent's diff is applied without the files that belong to the hidden tests, and without
those that Python would import in their place. What the agent did to them therefore does not count, whatever it was.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from polar_gym.evaluators import EvaluationContext, EvaluatorError
from polar_gym.evaluators.parsers import MISSING, PASSED, get_parser
from polar_gym.evaluators.patch import without_files
from polar_gym.evaluators.result import full_log, how_it_ended, log_tail
from polar_gym.registry import Options
from polar_gym.runtimes import Command, ExecResult, Sandbox
from polar_gym.runtimes.diff import apply_diff
from polar_gym.schema import EvaluationResult

_ENVIRONMENT = {"PYTHONPYCACHEPREFIX": "/tmp/polar-gym-pycache"}
"""Python looks for compiled files only here, never beside the sources: one in the diff could replace a hidden test."""

_PLACE_HIDDEN_TESTS = """
set -e
git() { command git -c safe.directory='*' "$@"; }
cat > /tmp/polar-gym-test.patch
git apply --whitespace=nowarn /tmp/polar-gym-test.patch
export GIT_INDEX_FILE=/tmp/polar-gym-index
git read-tree HEAD
git apply --cached --whitespace=nowarn /tmp/polar-gym-test.patch
git diff-index --cached --name-only --no-renames HEAD
rm /tmp/polar-gym-test.patch
"""
"""Applies the test patch and lists the paths that it touches, old names of renamed files too."""


class SweOptions(Options):
    test_command: str = Field(min_length=1)
    """Run by `sh -c` in the workspace."""
    FAIL_TO_PASS: list[str] = Field(min_length=1)
    """Tests that the issue is about: each must pass."""
    PASS_TO_PASS: list[str] = Field(default_factory=list)
    """Tests that passed before: each must still."""
    test_patch: str = ""
    """Hidden tests, a git patch against the base commit."""
    log_parser: str = "unittest"
    """`unittest`, `pytest`, or `package.module:function` (log -> test id -> status)."""

    @field_validator("log_parser")
    @classmethod
    def _known(cls, value: str) -> str:
        get_parser(value)
        return value


class Swe:
    Options = SweOptions

    def __init__(self, options: SweOptions) -> None:
        self._options = options
        self._parse = get_parser(options.log_parser)

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        if not context.diff.strip():
            return self._unresolved("the agent changed nothing")
        timeout = context.request.evaluator.timeout_seconds
        workspace = context.request.runtime.workspace.path
        async with context.fresh_sandbox() as sandbox:
            owned = await self._place_hidden_tests(sandbox)
            try:
                diff = without_files(context.diff, lambda path: _belongs_to(path, owned))
                await apply_diff(sandbox, workspace, diff)
            except ValueError as error:
                return self._unresolved(f"the agent's diff does not apply: {error}")
            result = await sandbox.exec(
                Command(
                    argv=["sh", "-c", self._options.test_command], environment=_ENVIRONMENT, timeout_seconds=timeout
                )
            )
        return self._grade(result, timeout)

    async def _place_hidden_tests(self, sandbox: Sandbox) -> set[bytes]:
        """Apply the test patch to the pristine workspace; the paths that it touches, as git quotes them."""
        if not self._options.test_patch.strip():
            return set()
        script = Command(argv=["sh", "-c", _PLACE_HIDDEN_TESTS], stdin=self._options.test_patch.encode())
        result = await sandbox.exec(script)
        if result.exit_code != 0:
            message = "timed out" if result.timed_out else result.stderr.decode(errors="replace").strip()
            raise EvaluatorError(f"test_patch does not apply to the base commit: {message}")
        return {name.strip(b'"') for name in result.stdout.splitlines()}

    def _grade(self, result: ExecResult, timeout: float) -> EvaluationResult:
        statuses = self._parse(full_log(result))
        groups = {"FAIL_TO_PASS": self._options.FAIL_TO_PASS, "PASS_TO_PASS": self._options.PASS_TO_PASS}
        tests = {test: statuses.get(test, MISSING) for group in groups.values() for test in group}
        failed = {name: [test for test in group if tests[test] != PASSED] for name, group in groups.items()}
        resolved = not result.timed_out and not any(failed.values())
        if resolved:
            detail = f"all {len(tests)} tests passed"
        else:
            counts = (f"{len(failed[name])} of {len(group)} {name} not passed" for name, group in groups.items())
            detail = f"{'; '.join(counts)}; the test command {how_it_ended(result, timeout)}"
        return EvaluationResult(
            evaluator="swe",
            reward=float(resolved),
            resolved=resolved,
            tests=tests,
            components={name.lower(): 1 - len(failed[name]) / len(group) for name, group in groups.items() if group},
            detail=detail,
            log=log_tail(result),
        )

    def _unresolved(self, detail: str) -> EvaluationResult:
        tests = dict.fromkeys([*self._options.FAIL_TO_PASS, *self._options.PASS_TO_PASS], MISSING)
        return EvaluationResult(evaluator="swe", reward=0.0, resolved=False, tests=tests, detail=detail)


def _belongs_to(path: bytes, owned: set[bytes]) -> bool:
    """Whether `path` is one of the hidden tests' files, or what Python would import instead of one: beside
    `test_a.py` the package `test_a/` and the compiled `test_a.*.so`."""
    return path in owned or any(
        path.startswith((stem + b"/", stem + b"."))
        for stem in (name.removesuffix(b".py") for name in owned if name.endswith(b".py"))
    )


EVALUATOR = Swe
