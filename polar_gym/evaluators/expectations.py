"""Finds what a Python test expects, and other values that the test could expect just as well.

An *expectation* is a piece of source: a literal that a result is compared with, a comparison, or the class of an
expected exception. If a test passes, then the same test with another text in one of these places fails, whatever the
tested code does, because a result cannot equal two values. The places are found in the source alone. Curation then
keeps those at which the reference solution fails (`curation.twins`).
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from polar_gym.evaluators.alternatives import Draw, choice, drawn

_EQUAL = frozenset(
    {
        *("assertEqual", "assertEquals", "assertAlmostEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual"),
        *("assertSetEqual", "assertSequenceEqual", "assertCountEqual", "assertMultiLineEqual"),
    }
)
_OPPOSITES = (
    *(("assertEqual", "assertNotEqual"), ("assertAlmostEqual", "assertNotAlmostEqual"), ("assertTrue", "assertFalse")),
    *(("assertIs", "assertIsNot"), ("assertIsNone", "assertIsNotNone"), ("assertIn", "assertNotIn")),
    *(("assertIsInstance", "assertNotIsInstance"), ("assertRegex", "assertNotRegex")),
    *(("assertLess", "assertGreaterEqual"), ("assertGreater", "assertLessEqual")),
)
_OPPOSITE = {name: other for pair in _OPPOSITES for name, other in (pair, pair[::-1])}
_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.GtE: (">=", "<"),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
    ast.Is: (r"is\b", "is not"),
    ast.IsNot: (r"is\s+not\b", "is"),
    ast.In: (r"in\b", "not in"),
    ast.NotIn: (r"not\s+in\b", "in"),
}
"""Comparison -> a regular expression for its text, and the text of its opposite."""

_OTHER_EMPTY = {"[]": "[None]", "()": "(None,)", "{}": "{None: None}"}
_EXCEPTIONS = (
    *(ZeroDivisionError, FloatingPointError, BufferError, EOFError),
    *(ChildProcessError, IsADirectoryError, StopAsyncIteration),
)
"""Classes that no solution raises by chance, nor as a second base of its own class."""

_HELPER = re.compile(r"_*(assert|check|expect|verify)")
_TOLERANCES = frozenset(
    {
        *("abs", "rel", "delta", "places", "decimal", "significant"),
        *("atol", "rtol", "abs_tol", "rel_tol", "tol", "tolerance", "eps", "epsilon"),
    }
)
"""Arguments by which a test accepts results beside the expected one. A result may then equal two literals."""
_BEFORE_TOLERANCE = {"approx": 1, "assertAlmostEqual": 2, "isclose": 2, "allclose": 2, "assert_allclose": 2}
"""Function -> how many positional arguments it has before its tolerance."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """A piece of a test's source, which could be another one."""

    start: int
    """Offset in bytes."""
    end: int
    capacity: int
    """How many texts the piece could have, the original one included."""
    draw: Draw
    bits: int = 0
    """How much code that compares the texts must guess; 0 where they tell the right one, as opposites and words do."""

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class TestFunction:
    """A test in a Python file."""

    qualified_name: str
    """`Class.method` or `function`."""
    start: int
    """Offset in bytes of the first line, decorators included."""
    end: int
    name_start: int
    """Offset in bytes of the function's name."""
    expectations: list[Expectation]

    @property
    def name(self) -> str:
        return self.qualified_name.rpartition(".")[2]


def find_tests(source: bytes, *, all_literals: bool = False) -> list[TestFunction]:
    """Return the tests of a Python file in its order; [] where this Python cannot parse the file as UTF-8.

    `all_literals`: a test's expectations are all its literals, inputs included.
    """
    try:
        tree = ast.parse(source.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    finder = _Finder(source)
    return list(finder.tests(tree.body, "", finder.literals_of if all_literals else finder.expectations_of))


Function = ast.FunctionDef | ast.AsyncFunctionDef
Places = Callable[[Function], Iterator[Expectation]]


class Offsets:
    """The offsets in bytes of the nodes of a file's syntax tree."""

    def __init__(self, source: bytes) -> None:
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def of(self, node: ast.AST) -> tuple[int, int]:
        line, column, end_line, end_column = (
            getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")
        )
        return self.lines[line - 1] + column, self.lines[end_line - 1] + end_column


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._offsets = Offsets(source)
        self._span = self._offsets.of
        self._words: frozenset[str] = frozenset()
        """The words in the literals of the test at hand."""
        self._tolerant = False
        """Whether the test at hand accepts several results, so that its literals are no expectations."""

    def tests(self, body: list[ast.stmt], prefix: str, places: Places) -> Iterator[TestFunction]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self.tests(node.body, f"{prefix}{node.name}.", places)
            elif isinstance(node, Function) and node.name.startswith("test"):
                start = self._offsets.lines[min([node, *node.decorator_list], key=lambda each: each.lineno).lineno - 1]
                end = self._offsets.lines[node.end_lineno or node.lineno]
                named = re.compile(rb"def\s+(" + node.name.encode() + rb")\b").search(self._source, start, end)
                if named is not None:
                    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                    self._words = frozenset(word for text in texts for word in re.findall(r"\w{2,}", str(text)))
                    found = {(each.start, each.end): each for each in places(node)}
                    yield TestFunction(prefix + node.name, start, end, named.start(1), _by_place(found.values()))

    def literals_of(self, test: Function) -> Iterator[Expectation]:
        """Yield all literals of a test and of its tables of cases."""
        self._tolerant = False
        for node in [*_tables(test), *test.body]:
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                yield from self._literals(node)

    def expectations_of(self, test: Function) -> Iterator[Expectation]:
        """Yield what a test expects."""
        self._tolerant = any(map(_has_tolerance, ast.walk(test)))
        for table in _tables(test):
            yield from self._last_of_rows(table)
        known = {
            node.targets[0].id: node.value
            for node in ast.walk(test)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }
        raising = {
            each
            for node in ast.walk(test)
            if isinstance(node, ast.With)
            for body in node.body
            for each in ast.walk(body)
        }
        for node in ast.walk(test):
            if isinstance(node, ast.Assert):
                yield from self._of_condition(node.test, known)
            elif isinstance(node, ast.For | ast.AsyncFor):
                table = known.get(node.iter.id) if isinstance(node.iter, ast.Name) else node.iter
                yield from self._last_of_rows(table)
            elif isinstance(node, ast.Expr) and node not in raising and _is_helper(node.value):
                yield from self._literals(node.value.args[-1])
            elif isinstance(node, ast.Call):
                yield from self._of_call(node, known)

    def _of_condition(self, node: ast.expr, known: dict[str, ast.expr]) -> Iterator[Expectation]:
        """Yield the expectations of an `assert` statement with this condition."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                yield from self._of_condition(value, known)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            right = node.comparators[0]
            found = self._of_pair(node.left, right, known) if isinstance(node.ops[0], ast.Eq) else []
            yield from found or self._of_operator(node.left, node.ops[0], right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._either(node, f"bool({ast.unparse(node.operand)})")
        else:
            yield self._either(node, f"not ({ast.unparse(node)})")

    def _of_call(self, node: ast.Call, known: dict[str, ast.expr]) -> Iterator[Expectation]:
        """Yield the expectations of a call of `assertEqual`, `pytest.raises`, or a helper whose name says as much."""
        name = _name_of(node)
        if name in _EQUAL and len(node.args) > 1:
            found = self._of_pair(node.args[0], node.args[1], known)
            yield from found or self._of_name(node.func, name)
        elif name in _OPPOSITE:
            yield from self._of_name(node.func, name)
        elif name in ("raises", "assertRaises", "assertRaisesRegex") and node.args:
            yield self._of_exception(node.args[0])
        elif _HELPER.match(name) and len(node.args) > 1:
            yield from self._literals(node.args[-1])

    def _of_pair(self, left: ast.expr, right: ast.expr, known: dict[str, ast.expr]) -> list[Expectation]:
        """Return the literals in the side of an equation that is the expected one."""
        sides = [known.get(side.id, side) if isinstance(side, ast.Name) else side for side in (right, left)]
        for side in sides:
            if _is_literal(side):
                return list(self._literals(side))
        return list(self._literals(sides[0])) if _is_made_of_literals(sides[0]) else []

    def _last_of_rows(self, table: ast.expr | None) -> Iterator[Expectation]:
        """Yield the literals in the last column of a table of cases."""
        for row in table.elts if isinstance(table, ast.List | ast.Tuple) else ():
            cells = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])
            if cells:
                yield from self._literals(cells[-1])

    def _literals(self, node: ast.AST) -> Iterator[Expectation]:
        if self._tolerant:
            return
        in_f_strings = {part for each in ast.walk(node) if isinstance(each, ast.JoinedStr) for part in ast.walk(each)}
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and each not in in_f_strings:
                if (others := drawn(each.value, self._words)) is not None:
                    yield Expectation(*self._span(each), *others)
            elif isinstance(each, ast.List | ast.Tuple | ast.Dict) and (other := _OTHER_EMPTY.get(ast.unparse(each))):
                yield self._either(each, other)

    def _of_operator(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Iterator[Expectation]:
        text, other = _OPERATORS[type(operator)]
        between = self._span(left)[1], self._span(right)[0]
        if found := re.compile(text.encode()).search(self._source, *between):
            yield Expectation(found.start(), found.end(), 2, choice([found[0].decode(), other]))

    def _of_name(self, function: ast.expr, name: str) -> Iterator[Expectation]:
        if name in _OPPOSITE and isinstance(function, ast.Attribute):
            end = self._span(function)[1]
            yield Expectation(end - len(name), end, 2, choice([name, _OPPOSITE[name]]))

    def _of_exception(self, node: ast.expr) -> Expectation:
        named = [ast.unparse(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]
        known = [getattr(builtins, text, None) for text in named]
        mine = [each for each in known if isinstance(each, type) and issubclass(each, BaseException)]
        others = [
            each.__name__
            for each in _EXCEPTIONS
            if not any(issubclass(each, expected) or issubclass(expected, each) for expected in mine)
        ]
        return Expectation(*self._span(node), 1 + len(others), choice([ast.unparse(node), *others]))

    def _either(self, node: ast.expr, other: str) -> Expectation:
        return Expectation(*self._span(node), 2, choice([ast.unparse(node), other]))


def _is_helper(node: ast.expr) -> TypeGuard[ast.Call]:
    """Return whether a statement calls a function with two arguments or more, as `same(total([]), 0)`.

    A single argument would be the input of the tested code.
    """
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1


def _has_tolerance(node: ast.AST) -> bool:
    """Return whether a test with this part accepts several results: `approx(x, abs=1)`, `abs(x - y) < 1`."""
    if isinstance(node, ast.Compare):
        ordered = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        return ordered and any(_name_of(side) in ("abs", "fabs") for side in (node.left, *node.comparators))
    if not isinstance(node, ast.Call):
        return False
    positional = len(node.args) > _BEFORE_TOLERANCE.get(_name_of(node), len(node.args))
    return positional or any(keyword.arg in _TOLERANCES for keyword in node.keywords)


def _name_of(node: ast.expr) -> str:
    """Return the name of the function that a call calls, without the object that has it; empty for no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _is_made_of_literals(node: ast.expr) -> bool:
    """Return whether an expression consists of literals, containers and calls, such as `[Point(1, 2)]`."""
    if isinstance(node, ast.Call):
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Dict):
        parts = [*filter(None, node.keys), *node.values]
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        parts = node.elts
    else:
        return _is_literal(node)
    return all(map(_is_made_of_literals, parts))


def _tables(test: Function) -> list[ast.expr]:
    """Return the tables of cases of a test: the second arguments of `parametrize`."""
    calls = [each for each in test.decorator_list if isinstance(each, ast.Call) and len(each.args) > 1]
    return [call.args[1] for call in calls if ast.unparse(call.func).endswith("parametrize")]


def _by_place(expectations: Iterable[Expectation]) -> list[Expectation]:
    return sorted(expectations, key=lambda each: (each.start, each.end))
