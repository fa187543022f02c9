"""Makes wrong variants of a right Python source: each differs in one small place.

Left alone are imports, annotations, aliases of types, texts of errors, of several words and of f-strings, docstrings,
and names such as `__version__`. No test of behaviour is expected to notice a change of these.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)

_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)),
]
_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
"""Operator -> the operator that replaces it; multiplication replaces all others."""
_LEFT_ALONE = (ast.Import, ast.ImportFrom, ast.JoinedStr)
_UNTYPED = {"annotation", "returns", "type_comment", "type_params"}
"""Fields of a node that hold types."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong variant."""

    line: int
    change: str
    """The replaced text and its replacement, in one line."""
    source: str


def mutants(source: str, lines: Collection[int]) -> list[Mutant]:
    """Return every variant of a source that changes code which begins on one of these lines, in order of the lines."""
    tree = ast.parse(source)
    found: dict[str, Mutant] = {}
    for node, replacement in sorted(_changes(tree), key=lambda change: (change[0].lineno, change[0].col_offset)):
        if node.lineno in lines:
            mutant = _mutant(source, node, replacement)
            if is_python(mutant.source) and ast.dump(ast.parse(mutant.source)) != ast.dump(tree):
                found.setdefault(mutant.source, mutant)
    return list(found.values())


def _changes(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Yield nodes below `node`, each with a replacement."""
    if isinstance(node, _LEFT_ALONE) or is_tag(node):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield from ((node, replacement) for replacement in _replacements(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node.test, ast.UnaryOp(op=ast.Not(), operand=node.test)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name not in _UNTYPED:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator, *others]):
            yield _with(node, ops=[_OPPOSITE[type(operator)](), *others])
        case ast.BinOp(op=operator):
            yield _with(node, op=_OPPOSITE.get(type(operator), ast.Mult)())
        case ast.BoolOp(op=operator, values=values):
            yield _with(node, op=_OPPOSITE[type(operator)]())
            for left_out in range(len(values)):
                rest = values[:left_out] + values[left_out + 1 :]
                yield _with(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Constant(value=str(value)) if len(value.split()) < 3:
            yield ast.Constant("" if value else "XX")
        case ast.Call(args=[first, second, *others]) if not isinstance(first, ast.Starred):
            yield _with(node, args=[second, first, *others])
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield ast.Pass()


def _with(node: Node, **changes: Any) -> Node:
    return type(node)(**{**dict(ast.iter_fields(node)), **changes})


def is_tag(node: ast.AST) -> bool:
    """Return whether a statement sets a name such as `__version__` or `__all__`, or an alias of a type."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
        return isinstance(node.value.value, ast.Name) and hasattr(typing, node.value.value.id)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id.startswith("__") for target in targets)


def _mutant(source: str, node: Any, replacement: ast.AST) -> Mutant:
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = ast.unparse(ast.fix_missing_locations(replacement))
    new = f"({text})" if isinstance(replacement, ast.expr) else text
    whole = source.encode()
    made = (whole[:start] + new.encode() + whole[end:]).decode()
    change = f"{' '.join(whole[start:end].decode().split())} -> {text}"
    return Mutant(node.lineno, change, made)


def is_python(source: str) -> bool:
    """Return whether a text is a source of this Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
