"""Makes tests of which one assertion is left: whether the base commit fails there tells the strength of a twin."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable

from polar_gym.evaluators.expectations import Expectation, Offsets, TestFunction


def alone(source: bytes, test: TestFunction, place: Expectation, name: str) -> bytes:
    """Return a copy of a test in which only the assertion around a place can fail.

    Other assertions only compute their values. A table of cases keeps only the case with the place. Where the
    place is in no assertion (a variable), all assertions stay.
    """
    offsets = Offsets(source)

    def holds(node: ast.AST) -> bool:
        start, end = offsets.of(node)
        return start <= place.start and place.end <= end

    tree = ast.parse(source.decode())
    found = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == test.name
        and test.start <= offsets.of(node)[0] < test.end
    )
    indent = " " * found.col_offset if source[test.start : test.start + 1] != b"\t" else "\t" * found.col_offset
    asserting = any(holds(node) for node in ast.walk(found) if _asserts(node))
    for decorator in found.decorator_list:
        if isinstance(decorator, ast.Call) and len(decorator.args) > 1 and holds(decorator.args[1]):
            _keep_row(decorator.args[1], holds)
    made = _WithoutFStrings().visit(_Alone(holds, asserting=asserting).visit(found))
    made.name = name
    return textwrap.indent(ast.unparse(ast.fix_missing_locations(made)), indent).encode() + b"\n\n"


class _Alone(ast.NodeTransformer):
    def __init__(self, holds: Callable[[ast.AST], bool], *, asserting: bool) -> None:
        self._holds = holds
        self._asserting = asserting

    def visit_For(self, node: ast.For) -> ast.AST:
        if self._holds(node.iter):
            _keep_row(node.iter, self._holds)
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Expr(node.test) if self._drops(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._drops(node):
            return ast.Expr(ast.Tuple([*node.value.args, *(each.value for each in node.value.keywords)], ast.Load()))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        held = any(self._holds(item.context_expr) for item in node.items)
        if self._asserting and any(map(_raises, node.items)) and not held:
            return ast.Try(node.body, [ast.ExceptHandler(ast.Name("BaseException"), None, [ast.Pass()])], [], [])
        return node

    def _drops(self, node: ast.AST) -> bool:
        return self._asserting and _asserts(node) and not self._holds(node)


class _WithoutFStrings(ast.NodeTransformer):
    """Writes f-strings as calls. With nested quotes, `ast.unparse` writes what only Python 3.12 and later can read."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        parts = [self.visit(each) for each in node.values]
        return ast.Call(ast.Attribute(ast.Constant(""), "join", ast.Load()), [ast.List(parts, ast.Load())], [])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        value = self.visit(node.value)
        if node.conversion > 0:
            name = {"s": "str", "r": "repr", "a": "ascii"}[chr(node.conversion)]
            value = ast.Call(ast.Name(name), [value], [])
        specification = self.visit(node.format_spec) if node.format_spec else ast.Constant("")
        return ast.Call(ast.Name("format"), [value, specification], [])


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return any(map(_raises, node.items))
    call = node.value if isinstance(node, ast.Expr) else None
    name = getattr(getattr(call, "func", None), "attr", "")
    return isinstance(node, ast.Assert) or name.startswith(("assert", "fail"))


def _raises(item: ast.withitem) -> bool:
    name = getattr(getattr(item.context_expr, "func", None), "attr", "")
    return name == "raises" or name.startswith("assertRaises")


def _keep_row(table: ast.expr, holds: Callable[[ast.AST], bool]) -> None:
    if isinstance(table, ast.List | ast.Tuple):
        table.elts = [row for row in table.elts if holds(row)] or table.elts
