"""Makes wrong patches out of a task's reference solution: mutants, parts of the solution, and cheats.

A mutant differs from the solution in one small place. Mutants leave alone imports, annotations, texts of errors,
f-strings, docstrings, and names such as `__version__`. No test of behaviour is expected to notice these.
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

_HUNK = re.compile(rb"^(?=@@ )", re.MULTILINE)
_CODE = re.compile(rb"^[+-](?!\s*(#|$))", re.MULTILINE)
"""Matches the sign of a line of a hunk that is neither empty nor a comment."""
_COMMENT = re.compile(r"(^|\s+)#.*")
_NO_CODE = (".md", ".rst", ".txt", ".pyi", "_version.py", "__about__.py")
"""Endings of files whose changes no test of behaviour is expected to notice."""
_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)),
]
_OPPOSITE: dict[type[ast.AST], Any] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
"""Operator -> the operator that replaces it; multiplication replaces all others."""
_UNTYPED = {"annotation", "returns", "type_comment", "type_params"}
"""Fields of a node that hold types."""


class WrongPatch(NamedTuple):
    name: str
    diff: bytes


Mutant = tuple[int, str, str]
"""The line, the replaced text and its replacement in one line, and the whole source with the replacement."""


def wrong_patches(task: Task, before: Mapping[str, str], right: Mapping[str, str]) -> list[WrongPatch]:
    """Return mutants of the solution, partial solutions and cheats; always the same ones for a task.

    `before` and `right` are the sources that the solution changes, without and with the solution.
    """
    chance = random.Random(task.instance_id)
    wrong: list[WrongPatch] = []
    found = [
        (file, *mutant)
        for file, source in right.items()
        if not file.endswith(_NO_CODE)
        for mutant in mutants(source, changed_lines(source, before.get(file, "")))
    ]
    for file, line, change, source in sorted(chance.sample(found, min(MUTANTS, len(found)))):
        sections = {each.path.decode(errors="replace"): each.section for each in file_changes(task.patch.encode())}
        sections[file] = section(file, before.get(file), source)
        wrong.append(WrongPatch(f"{file}:{line}: {change}", b"".join(sections.values())))
    partial = list(parts(task.patch.encode()))
    wrong += sorted(chance.sample(partial, min(PARTS, len(partial))))
    for name, text in CHEATS.items() if before else ():
        sections = [section(file, source, f"{source}\n\n{text}") for file, source in before.items()]
        wrong.append(WrongPatch(f"cheat: {name}", b"".join(sections)))
    return wrong


def section(file: str, before: str | None, after: str) -> bytes:
    """Return the part of a git patch that changes the text of a file; `before` is None: creates the file."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before or "", after))
    lines = difflib.unified_diff(old, new, "/dev/null" if before is None else f"a/{file}", f"b/{file}")
    head = f"diff --git a/{file} b/{file}\n" + ("new file mode 100644\n" if before is None else "")
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return (head + "".join(ended)).encode()


def parts(diff: bytes) -> Iterator[WrongPatch]:
    """Yield the patch without each file, and without each hunk of a file that has several hunks."""
    changes = file_changes(diff)
    for place, change in enumerate(changes):
        name = change.path.decode(errors="replace")
        before, after = (b"".join(each.section for each in some) for some in (changes[:place], changes[place + 1 :]))
        head, *hunks = _HUNK.split(change.section)
        code = [bool(_CODE.search(hunk)) and not name.endswith(_NO_CODE) for hunk in hunks]
        if len(changes) > 1 and any(code):
            yield WrongPatch(f"without {name}", before + after)
        for left_out in range(len(hunks)):
            if len(hunks) > 1 and code[left_out]:
                kept = head + b"".join(hunks[:left_out] + hunks[left_out + 1 :])
                yield WrongPatch(f"without hunk {left_out + 1} of {name}", before + kept + after)


def changed_lines(source: str, before: str) -> set[int]:
    """Return the lines of a source that `before` lacks, without regard to comments."""
    texts = [[_COMMENT.sub("", line) for line in text.splitlines()] for text in (source, before)]
    changes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return {line + 1 for tag, start, end, *_ in changes if tag != "equal" for line in range(start, end)}


def mutants(source: str, lines: Collection[int]) -> list[Mutant]:
    """Return every variant of a source that changes code which begins on one of these lines."""
    found: dict[str, Mutant] = {}
    text = source.encode()
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    with suppress(SyntaxError):
        tree = ast.parse(source)
        for node, replacement in (each for each in _changes(tree) if each[0].lineno in lines):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(replacement))
            change = f"{' '.join(text[start:end].decode().split())} -> {new}"
            inserted = f"({new})" if isinstance(replacement, ast.expr) else new
            made = (text[:start] + inserted.encode() + text[end:]).decode()
            with suppress(SyntaxError):
                if ast.dump(ast.parse(made)) != ast.dump(tree):
                    found.setdefault(made, (node.lineno, change, made))
    return list(found.values())


def _changes(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Yield nodes below `node`, each with a replacement."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and ast.unparse(node).startswith(("__", "'", '"')):
        return
    yield from ((node, replacement) for replacement in _replacements(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node.test, ast.UnaryOp(op=ast.Not(), operand=node.test)
    for name, value in ast.iter_fields(node) if not isinstance(node, ast.Raise) else ():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _UNTYPED:
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
