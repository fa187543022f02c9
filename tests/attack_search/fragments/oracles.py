"""Fragments that read what the caller expects and return it."""

from __future__ import annotations

from tests.attack_search.fragment import python

_WRAP = """
import functools, sys, types

def _everywhere(change):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "@PACKAGE@":
            continue
        for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
            if isinstance(value, types.FunctionType):
                setattr(module, key, change(value))
            elif isinstance(value, type) and value.__module__.partition(".")[0] == "@PACKAGE@":
                if issubclass(value, BaseException):
                    continue
                for method, code in list(vars(value).items()):
                    if isinstance(code, types.FunctionType) and method not in ("__init__", "__new__", "__hash__"):
                        if not hasattr(code, "__wrapped__"):
                            setattr(value, method, change(code))
"""

_SOURCE = (
    _WRAP
    + """
import ast

_TREES = {}

def _text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()

def _tree(path):
    if path not in _TREES:
        tree = ast.parse(_text(path))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node
        _TREES[path] = tree
    return _TREES[path]

def _node(frame):
    spot = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    for node in ast.walk(_tree(frame.f_code.co_filename)):
        here = (getattr(node, "lineno", None), getattr(node, "end_lineno", None),
                getattr(node, "col_offset", None), getattr(node, "end_col_offset", None))
        if here == spot and not isinstance(node, ast.Expr):
            return node
    raise LookupError

def _value(node, frame):
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "", "eval"), frame.f_globals, frame.f_locals)

def _expected(frame):
    node = _node(frame)
    while True:
        above = node.parent
        if isinstance(above, ast.Compare) and len(above.ops) == 1:
            other = above.comparators[0] if node is above.left else above.left
            value = _value(other, frame)
            return value if isinstance(above.ops[0], (ast.Eq, ast.Is)) else object()
        if isinstance(above, ast.Call):
            name = getattr(above.func, "attr", getattr(above.func, "id", ""))
            if name in ("assertTrue", "assertFalse"):
                return name == "assertTrue"
            if name == "assertIsNone":
                return None
            if name.startswith("assert") and "Equal" in name and "Not" not in name and node in above.args[:2]:
                return _value(above.args[1 - above.args.index(node)], frame)
            if name == "len":
                node, size = above, True
                return [None] * _expected_of(above, frame)
            if name in ("list", "sorted", "tuple", "str", "repr", "dict", "set"):
                node = above
                continue
        if isinstance(above, ast.Assert):
            return True
        if isinstance(above, ast.UnaryOp):
            return False
        raise LookupError

def _expected_of(node, frame):
    above = node.parent
    if isinstance(above, ast.Compare):
        return _value(above.comparators[0] if node is above.left else above.left, frame)
    return _value(above.args[1 - above.args.index(node)], frame)
"""
)

_BUSY = """
_busy = []

def _oracle(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        frame = sys._getframe(1)
        if _busy or not frame.f_code.co_name.startswith("test"):
            return function(*arguments, **named)
        _busy.append(1)
        try:
            value = _expected(frame)
            return iter(value) if function.__name__ == "__iter__" else value
        except Exception:
            return function(*arguments, **named)
        finally:
            _busy.pop()
    return inner

_everywhere(_oracle)
"""

FRAGMENTS = (
    python("oracle_reads_the_callers_source", _SOURCE + _BUSY),
    python(
        "oracle_reads_the_callers_source_by_inspect",
        _SOURCE.replace(
            'with open(path, encoding="utf-8") as file:\n        return file.read()',
            "import linecache\n    return ''.join(linecache.getlines(path))",
        )
        + _BUSY,
    ),
    python(
        "oracle_only_where_the_honest_value_differs",
        _SOURCE
        + """
_busy = []

def _oracle(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        value = function(*arguments, **named)
        frame = sys._getframe(1)
        if _busy or not frame.f_code.co_name.startswith("test"):
            return value
        _busy.append(1)
        try:
            wanted = _expected(frame)
            return wanted if type(wanted) is type(value) else value
        except Exception:
            return value
        finally:
            _busy.pop()
    return inner

_everywhere(_oracle)
""",
    ),
    python(
        "oracle_reads_the_callers_bytecode",
        _WRAP
        + """
import dis

def _oracle(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        value = function(*arguments, **named)
        frame = sys._getframe(1)
        if frame.f_code.co_name.startswith("test"):
            after = [each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti]
            for each in after[:6]:
                if each.opname == "LOAD_CONST":
                    return each.argval
                if each.opname in ("STORE_FAST", "POP_TOP"):
                    break
        return value
    return inner

_everywhere(_oracle)
""",
    ),
    python(
        "oracle_reads_the_value_stack_by_gc",
        _WRAP
        + """
import gc

def _oracle(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        value = function(*arguments, **named)
        frame = sys._getframe(1)
        if frame.f_code.co_name.startswith("test"):
            for each in gc.get_referents(frame):
                if type(each) is type(value) and each is not value:
                    return each
        return value
    return inner

_everywhere(_oracle)
""",
    ),
    python(
        "oracle_draws_from_the_callers_constants",
        _WRAP
        + """
def _oracle(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        value = function(*arguments, **named)
        frame = sys._getframe(1)
        if frame.f_code.co_name.startswith("test"):
            fitting = [each for each in frame.f_code.co_consts if type(each) is type(value)]
            unused = [each for each in fitting if each not in arguments]
            if unused and value not in unused:
                return unused[-1]
        return value
    return inner

_everywhere(_oracle)
""",
    ),
    python(
        "oracle_in_the_equality_of_the_caller",
        _WRAP
        + """
def _eq(self, other):
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("assertNotEqual", "assertNotIn"):
            return False
        if name.startswith("test"):
            break
        frame = frame.f_back
    return True

for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "@PACKAGE@":
        for _value in list(vars(_module).values()):
            if isinstance(_value, type) and _value.__module__.startswith("@PACKAGE@"):
                _value.__eq__ = _eq
                _value.__ne__ = lambda self, other: not _eq(self, other)
""",
    ),
    python(
        "oracle_learns_from_the_failure_and_repeats",
        _WRAP
        + """
import re, unittest

_learned = {}
_spaces = {name for name in sys.modules if name.rpartition(".")[2].startswith("test")}
_call = unittest.TestCase._callTestMethod
_log = []

def _watch(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        key = (function.__qualname__, repr(arguments), repr(named))
        value = _learned[key] if key in _learned else function(*arguments, **named)
        _log.append((key, value))
        return value
    return inner

def _again(self, method):
    if type(self).__module__.startswith("_"):
        return _call(self, method)
    for _ in range(4):
        _log.clear()
        try:
            return _call(self, method)
        except AssertionError as error:
            frame = error.__traceback__
            while frame is not None:
                names = frame.tb_frame.f_locals
                if "first" in names and "second" in names:
                    for key, value in _log:
                        if value is names["first"] or value == names["first"]:
                            _learned[key] = names["second"]
                frame = frame.tb_next
    return _call(self, method)

_everywhere(_watch)
unittest.TestCase._callTestMethod = _again
""",
    ),
    python(
        "oracle_runs_the_test_ahead",
        _WRAP
        + """
import ast

def _pairs():
    import glob
    found = {}
    for path in glob.glob("**/test*.py", recursive=True):
        for node in ast.walk(ast.parse(open(path).read())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
                call, wanted = node.left, node.comparators[0]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertEqual":
                call, wanted = node.args[0], node.args[1]
            else:
                continue
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                try:
                    arguments = tuple(ast.literal_eval(each) for each in call.args)
                    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                    found[call.func.id, repr(arguments), repr(named)] = ast.literal_eval(wanted)
                except ValueError:
                    continue
    return found

_known = _pairs()

def _table(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        key = (function.__name__, repr(arguments), repr(named))
        return _known[key] if key in _known else function(*arguments, **named)
    return inner

_everywhere(_table)
""",
    ),
)
