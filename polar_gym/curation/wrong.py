"""Makes wrong patches out of a task's reference solution: mutants, parts of the solution, and cheats.

A mutant differs from the solution in one small place. Mutants leave alone imports, annotations, texts of errors,
f-strings, docstrings, and names such as `__version__`. No test of behaviour is expected to notice these. A part lacks
more than comments, annotations, docstrings and such names.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import random
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from polar_gym.curation.cheats import CHEATS
from polar_gym.evaluators.patch import file_changes
from polar_gym.tasks import Task

MUTANTS, PARTS = 40, 20
"""The number of mutants and of partial solutions that are tried at most."""

_COMMENT = re.compile(r"(^|\s+)#.*")
_NO_CODE = (".md", ".rst", ".txt", ".pyi", "_version.py", "__about__.py")
"""Endings of files whose changes no test of behaviour is expected to notice."""
_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)),
]
_OPPOSITE: dict[type[ast.AST], Any] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
"""Operator -> the operator that replaces it; multiplication replaces all others."""
_UNTESTED = {"annotation", "returns", "type_comment", "type_params", "msg"}
"""Fields of a node that hold types, or the text of an assertion's error."""


class WrongPatch(NamedTuple):
    name: str
    diff: bytes


def wrong_patches(task: Task, before: Mapping[str, str], right: Mapping[str, str]) -> list[WrongPatch]:
    """Return mutants of the solution, partial solutions and cheats; always the same ones for a task.

    `before` and `right` are the texts of the files that the solution changes, without and with the solution.
    """
    chance = random.Random(task.instance_id)
    code = {file: text for file, text in right.items() if not file.endswith(_NO_CODE)}
    mutated = [
        (file, f"{file}:{change}", text)
        for file, source in code.items()
        if file.endswith(".py")
        for text, change in mutants(source, changed_lines(source, before.get(file, ""))).items()
    ]
    partial = [part for file, source in code.items() for part in parts(file, before.get(file, ""), source)]
    chosen = sorted(chance.sample(mutated, min(MUTANTS, len(mutated))))
    chosen += sorted(chance.sample(partial, min(PARTS, len(partial))))
    wrong: list[WrongPatch] = []
    for file, name, text in chosen:
        sections = {each.path.decode(errors="replace"): each.section for each in file_changes(task.patch.encode())}
        sections[file] = section(file, before.get(file), text)
        if diff := b"".join(sections.values()):
            wrong.append(WrongPatch(name, diff))
    python = {file: source for file, source in before.items() if file.endswith(".py")}
    for name, text in CHEATS.items() if python else ():
        sections = [section(file, source, f"{source}\n\n{text}") for file, source in python.items()]
        wrong.append(WrongPatch(f"cheat: {name}", b"".join(sections)))
    return wrong


def section(file: str, before: str | None, after: str) -> bytes:
    """Return the part of a git patch that changes the text of a file; `before` is None: creates the file."""
    source = "/dev/null" if before is None else f"a/{file}"
    lines = difflib.unified_diff(_lines(before or ""), _lines(after), source, f"b/{file}")
    head = f"diff --git a/{file} b/{file}\n" + ("new file mode 100644\n" if before is None else "")
    ended = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return (head + ended).encode() if ended else b""


def parts(file: str, before: str, right: str) -> Iterator[tuple[str, str, str]]:
    """Yield `before`, and `right` without each of several hunks, where the code differs: file, name, text."""
    old, new = _lines(before), _lines(right)
    hunks = list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes())
    found = {f"without {file}": before}
    for number, hunk in enumerate(hunks, start=1) if len(hunks) > 1 else ():
        lines = list(new)
        for _, start, end, at, until in reversed(hunk):
            lines[at:until] = old[start:end]
        found[f"without hunk {number} of {file}"] = "".join(lines)
    yield from ((file, name, text) for name, text in found.items() if _code(file, text) != _code(file, right))


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="\n").readlines()


def _code(file: str, text: str) -> object:
    """Return what tests may notice of a file: without comments, and in Python without docstrings, types and tags."""
    if file.endswith(".py"):
        with suppress(SyntaxError):
            return _bare(ast.parse(text))
    return [line for line in text.splitlines() if not line.strip().startswith("#") and line.strip()]


def _bare(node: object) -> object:
    if isinstance(node, list):
        return [_bare(each) for each in node if not _is_tag(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node), *(_bare(value) for name, value in ast.iter_fields(node) if name not in _UNTESTED)]


def _is_tag(node: object) -> bool:
    """Return whether a node is a docstring or gives a name such as `__version__` a value."""
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and ast.unparse(node).startswith(("__", "'", '"'))


def changed_lines(source: str, before: str) -> set[int]:
    """Return the lines of a source that `before` lacks, without regard to comments."""
    texts = [
        [_COMMENT.sub("", line) for line in io.StringIO(text, newline=None).read().split("\n")]  # the lines of `ast`
        for text in (source, before)
    ]
    changes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return {line + 1 for tag, start, end, *_ in changes if tag != "equal" for line in range(start, end)}


def mutants(source: str, lines: Collection[int]) -> dict[str, str]:
    """Return every variant of a source that changes code which begins on one of these lines -> the line: the change."""
    found: dict[str, str] = {}
    text = source.encode()
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    with suppress(SyntaxError):
        tree = ast.parse(source)
        for node, replacement in (each for each in _changes(tree) if each[0].lineno in lines):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(replacement))
            change = f"{node.lineno}: {' '.join(text[start:end].decode().split())} -> {new}"
            inserted = f"({new})" if isinstance(replacement, ast.expr) else new
            made = (text[:start] + inserted.encode() + text[end:]).decode()
            with suppress(SyntaxError):
                if ast.dump(ast.parse(made)) != ast.dump(tree):
                    found.setdefault(made, change)
    return found


def _changes(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Yield nodes below `node`, each with a replacement."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr) or _is_tag(node):
        return
    yield from ((node, replacement) for replacement in _replacements(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node.test, ast.UnaryOp(op=ast.Not(), operand=node.test)
    for name, value in ast.iter_fields(node) if not isinstance(node, ast.Raise) else ():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _UNTESTED:
                yield from _changes(child)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=[operator, *others], comparators=right):
            yield ast.Compare(left, [_OPPOSITE[type(operator)](), *others], right)
        case ast.BinOp(left=left, op=operator, right=right):
            yield ast.BinOp(left, _OPPOSITE.get(type(operator), ast.Mult)(), right)
        case ast.BoolOp(op=operator, values=values):
            yield ast.BoolOp(_OPPOSITE[type(operator)](), values)
            for left_out in range(len(values)):
                rest = values[:left_out] + values[left_out + 1 :]
                yield ast.BoolOp(operator, rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Constant(value=str(value)):
            yield ast.Constant("" if value else "XX")
        case ast.Call(func=function, args=[first, second, *others], keywords=keywords):
            yield ast.Call(function, [second, first, *others], keywords)
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield ast.Pass()
