"""Tells whether a wrong variant of a solution behaves as the solution does.

The functions that differ are called with the arguments that the hidden tests give them, and with variants of these.
Two sources count as equivalent only if each such function did the same on `ENOUGH` inputs that ran a differing line.
Code that differs outside of functions is never called equivalent. Nor is a function whose results cannot be compared.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from polar_gym.curation.bench import Bench
from polar_gym.curation.wrong import WrongPatch
from polar_gym.evaluators import EVALUATORS
from polar_gym.evaluators.expectations import Expectation, TestFunction, find_tests
from polar_gym.evaluators.result import full_log
from polar_gym.evaluators.swe import Swe
from polar_gym.evaluators.twins import Edit, Twins, copy, names_test, new_name, rewritten
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task

ENOUGH = 20
"""The least number of inputs on which a function must have done the same."""
EXAMPLES = 3
REPLAY_SECONDS = 300.0

_COMMENT = re.compile(r"(^|\s+)#.*")

Functions = Mapping[str, list[int]]
"""`file::name` of a function -> the lines of the solution in it that differ."""


class _Split(ast.NodeTransformer):
    """Takes the functions of modules and classes out of a tree. Removes types, docstrings and name tags."""

    def __init__(self) -> None:
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._scope: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if is_tag(node) else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return self.visit(ast.Assign(targets=[node.target], value=node.value)) if node.value else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module == "typing" else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        name = ".".join([*self._scope, node.name])
        node.returns = None
        self._scope.append("<locals>")
        self.generic_visit(node)
        self._scope.pop()
        if "<locals>" in self._scope:
            return node
        self.functions.setdefault(name, []).append(node)
        return ast.Name(name)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


async def _outcomes(task: Task, bench: Bench, diff: bytes, turn: int) -> dict[str, str]:
    """Return what each copy did with a patch, under the copy's change; {} where the run does not end by itself."""
    changes: dict[str, str] = {}
    context = bench.context(task, diff)
    swe = EVALUATORS.make(context.request.evaluator)
    assert isinstance(swe, Swe)
    run = await swe.run(context, lambda sources: _altered(task, sources, turn, changes))
    if isinstance(run, EvaluationResult) or run.result.timed_out or not changes:
        return {}
    return {changes[name]: told for name, told in outcomes(changes, run.testimony.tests, full_log(run.result)).items()}


def first_lines(file: str, source: str) -> list[tuple[str, int, str]]:
    """Return file, first line and `file::name` of each function."""
    split = _Split()
    split.visit(ast.parse(source))
    return [
        (file, min([node.lineno, *(each.lineno for each in node.decorator_list)]), f"{file}::{name}")
        for name, nodes in split.functions.items()
        for node in nodes
    ]


def differing_lines(right: str, wrong: str, *, beside: bool = False) -> set[int]:
    """Return the lines of `right` that `wrong` lacks, without regard to comments.

    `beside`: also the line after each place where `wrong` has lines that `right` lacks.
    """
    code = [[_COMMENT.sub("", line) for line in source.splitlines()] for source in (right, wrong)]
    matcher = difflib.SequenceMatcher(None, *code, autojunk=False)
    changed = ((start, end) for tag, start, end, *_ in matcher.get_opcodes() if tag != "equal")
    return {line + 1 for start, end in changed for line in range(start, max(end, start + beside))}


async def record(trial: Trial, sources: Mapping[str, str]) -> None:
    """Record the calls of all functions of the sources while the hidden tests run on the solution."""
    functions = [line for file, source in sources.items() for line in first_lines(file, source)]
    await trial.run(b"", f"cat > {PLACE}/functions.json", stdin=json.dumps(functions).encode())
    await trial.passes(trial.gold, {"PYTHONPATH": PLACE})
    await trial.run(trial.gold, f'"$(cat {PLACE}/python)" {PLACE}/replay.py make', seconds=REPLAY_SECONDS)


async def compared(trial: Trial, wrong: bytes, functions: Functions) -> str:
    """Return the inputs on which the solution and `wrong` did the same; "" where they are not shown to be equivalent.

    Behaviour is that of public functions: for a private one, the public ones of its file are called, as far as any of
    them runs a differing line. `trial` holds the recorded calls.
    """
    lines: dict[str, list[int]] = {}
    for name, mine in functions.items():
        file = name.partition("::")[0]
        lines[file] = [*lines.get(file, []), *mine]
    outcomes = [await _outcomes(trial, diff, lines) for diff in (trial.gold, trial.gold, wrong)]
    if len({len(each) for each in outcomes}) > 1:
        return ""
    same: dict[str, list[str]] = {}
    different: set[str] = set()
    for (name, shown, reached, outcome), again, other in zip(*outcomes, strict=True):
        if outcome is None or outcome != again[3]:
            continue
        if outcome != other[3]:
            different.add(name)
        elif reached and outcome != "timed out":
            same.setdefault(name, []).append(shown)
    callers = {caller for name in functions for caller in _callers(name, same)}
    if any(not _is_private(name) for name in different) or different & callers:
        return ""
    if any(sum(len(same[caller]) for caller in _callers(name, same)) < ENOUGH for name in functions):
        return ""
    return "; ".join(
        f"{name} on {len(same[name])} inputs, e.g. ({'), ('.join(same[name][:EXAMPLES])})" for name in sorted(callers)
    )


def _callers(name: str, reached: Collection[str]) -> list[str]:
    """Return the functions whose behaviour shows that of function `name`, among those that reached a differing line."""
    if not _is_private(name):
        return [each for each in reached if each == name]
    file = name.partition("::")[0]
    public = [each for each in reached if each.partition("::")[0] == file and not _is_private(each)]
    return public or [each for each in reached if each == name]


def _is_private(name: str) -> bool:
    parts = name.partition("::")[2].split(".")
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


async def _outcomes(trial: Trial, diff: bytes, lines: Mapping[str, list[int]]) -> list[Any]:
    python = f'"$(cat {PLACE}/python)" {PLACE}/replay.py run'
    result = await trial.run(diff, python, stdin=json.dumps(lines).encode(), seconds=REPLAY_SECONDS)
    with suppress(ValueError):  # the functions may print, or end the process
        return json.loads(result.stdout)
    return []
