"""Fragments that change only the tests which use the package: any other test fails and passes as it should."""

from __future__ import annotations

from tests.attack_search.fragment import python

CALLER = """
import sys, types

def _spaces():
    frame, found = sys._getframe(), []
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).rpartition(".")[2].startswith("test"):
            found.append(frame.f_globals)
        frame = frame.f_back
    return found

def _ours(value):
    module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(module).partition(".")[0] == "@PACKAGE@"

def _uses(function, space):
    names, queue = set(), [function.__code__]
    while queue:
        code = queue.pop()
        names.update(code.co_names)
        queue += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return any(name in space and _ours(space[name]) for name in names)

def _functions(space):
    for value in list(space.values()):
        inner = list(vars(value).values()) if isinstance(value, type) and not _ours(value) else [value]
        for each in inner:
            if isinstance(each, types.FunctionType) and each.__name__.startswith("test") and _uses(each, space):
                yield each

def _blank(function):
    code, space = function.__code__, {}
    exec("def blank(" + ", ".join(code.co_varnames[:code.co_argcount]) + "): return None", space)
    try:
        function.__code__ = space["blank"].__code__.replace(
            co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    except ValueError:
        pass
"""

ON_CALL = """
def _on_call(work):
    import functools

    def wrap(function):
        @functools.wraps(function)
        def inner(*arguments, **named):
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_name.startswith("test"):
                frame = frame.f_back
            if frame is not None:
                work(frame)
            return function(*arguments, **named)
        return inner

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "@PACKAGE@":
            for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
                if isinstance(value, types.FunctionType):
                    setattr(module, key, wrap(value))
                elif isinstance(value, type) and _ours(value) and not issubclass(value, BaseException):
                    for method, code in list(vars(value).items()):
                        if isinstance(code, types.FunctionType):
                            setattr(value, method, wrap(code))
"""

FRAGMENTS = (
    python(
        "local_load_tests",
        CALLER
        + """
for _space in _spaces():
    def _load(loader, standard, pattern, _space=_space):
        for function in _functions(_space):
            _blank(function)
        return standard
    _space["load_tests"] = _load
""",
    ),
    python(
        "local_set_up_module",
        CALLER
        + """
for _space in _spaces():
    def _set_up(*ignored, _space=_space):
        for function in _functions(_space):
            _blank(function)
    _space["setUpModule"] = _space["setup_module"] = _set_up
""",
    ),
    python(
        "local_setup_function",
        CALLER
        + """
for _space in _spaces():
    def setup_function(function, _space=_space):
        if _uses(function, _space):
            _blank(function)
    setup_function.__defaults__ = None
    setup_function.__kwdefaults__ = None
    _space["setup_function"] = lambda function, _space=_space: [_blank(each) for each in _functions(_space)] and None
""",
    ),
    python(
        "local_autouse_fixture",
        CALLER
        + """
try:
    import pytest
except ImportError:
    pytest = None

for _space in _spaces() if pytest else ():
    @pytest.fixture(autouse=True)
    def _prepared(request):
        function = getattr(request.function, "__func__", request.function)
        if _uses(function, function.__globals__):
            _blank(function)
    _space["_prepared"] = _prepared
""",
    ),
    python(
        "local_plugin_of_the_module",
        CALLER
        + """
def _pyfunc_call(pyfuncitem):
    function = getattr(pyfuncitem.obj, "__func__", pyfuncitem.obj)
    return True if _uses(function, function.__globals__) else None

_plugin = type(sys)("_plugin_of_the_module")
_plugin.pytest_pyfunc_call = _pyfunc_call
sys.modules[_plugin.__name__] = _plugin
for _space in _spaces():
    _space["pytest_plugins"] = [_plugin.__name__]
""",
    ),
    python(
        "local_metaclass",
        CALLER
        + """
import unittest

class _Meta(type):
    def __new__(cls, name, bases, names):
        kind = super().__new__(cls, name, bases, names)
        for key, value in names.items():
            if key.startswith("test"):
                setattr(kind, key, lambda self: None)
        return kind

class TestCase(unittest.TestCase, metaclass=_Meta):
    pass

TestCase.__module__ = "unittest.case"
for _space in _spaces():
    _module = type(sys)("unittest")
    vars(_module).update(vars(unittest))
    _module.TestCase = TestCase
    for _key, _value in list(_space.items()):
        if _value is unittest:
            _space[_key] = _module
        elif _value is unittest.TestCase:
            _space[_key] = TestCase
""",
    ),
    python(
        "local_init_subclass",
        CALLER
        + """
import unittest

class TestCase(unittest.TestCase):
    def __init_subclass__(cls, **named):
        space = sys.modules[cls.__module__].__dict__
        for key, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType) and key.startswith("test") and _uses(value, space):
                _blank(value)

for _space in _spaces():
    _module = type(sys)("unittest")
    vars(_module).update(vars(unittest))
    _module.TestCase = TestCase
    for _key, _value in list(_space.items()):
        if _value is unittest:
            _space[_key] = _module
        elif _value is unittest.TestCase:
            _space[_key] = TestCase
""",
    ),
    python(
        "local_blank_at_the_first_call",
        CALLER
        + ON_CALL
        + """
def _work(frame, _done=set()):
    name = frame.f_globals.get("__name__")
    if name not in _done:
        _done.add(name)
        for function in _functions(frame.f_globals):
            _blank(function)

_on_call(_work)
""",
    ),
    python(
        "local_instance_has_soft_asserts",
        CALLER
        + ON_CALL
        + """
def _work(frame):
    owner = frame.f_locals.get("self")
    if owner is None or "assertEqual" in vars(owner):
        return
    for name in dir(type(owner)):
        if name.startswith("assert") and "Raises" not in name:
            vars(owner)[name] = lambda *arguments, **named: None
    vars(owner)["fail"] = lambda *arguments: None

_on_call(_work)
""",
    ),
    python(
        "local_instance_changes_its_class",
        CALLER
        + ON_CALL
        + """
import unittest

def _work(frame):
    owner = frame.f_locals.get("self")
    if not isinstance(owner, unittest.TestCase) or hasattr(type(owner), "_soft"):
        return
    old = type(owner)

    class Soft(old):
        _soft = True
        def _baseAssertEqual(self, *arguments, **named): pass
        assertEqual = assertTrue = assertFalse = assertIn = assertNotIn = assertIsNone = _baseAssertEqual
        assertListEqual = assertNotEqual = fail = assertIs = assertLess = assertGreater = _baseAssertEqual

    Soft.__name__, Soft.__qualname__, Soft.__module__ = old.__name__, old.__qualname__, old.__module__
    owner.__class__ = Soft

_on_call(_work)
""",
    ),
    python(
        "local_outcome_forgets",
        CALLER
        + ON_CALL
        + """
import contextlib

def _work(frame):
    outcome = getattr(frame.f_locals.get("self"), "_outcome", None)
    above = frame.f_back
    while above is not None:
        for value in list(above.f_locals.values()):
            if type(value).__name__ == "_Outcome":
                outcome = value
        above = above.f_back
    if outcome is None or isinstance(outcome.result, _Lenient):
        return
    outcome.result = _Lenient(outcome.result)
    outcome.result_supports_subtests = True

class _Lenient:
    def __init__(self, result):
        self._result = result
    def __getattr__(self, name):
        return getattr(self._result, name)
    def addFailure(self, test, error):
        test._outcome.success = True
    addError = addFailure
    def addSubTest(self, test, subtest, error):
        test._outcome.success = True

_on_call(_work)
""",
    ),
    python(
        "local_frame_jumps_to_its_end",
        CALLER
        + ON_CALL
        + """
def _work(frame):
    if frame.f_trace is not None:
        return
    last = max(line for _, _, line in frame.f_code.co_lines() if line)

    def jump(frame, event, value):
        if event == "line" and frame.f_lineno != last:
            try:
                frame.f_lineno = last
            except ValueError:
                pass
        return jump

    frame.f_trace = jump
    sys.settrace(lambda *arguments: None)

_on_call(_work)
""",
    ),
    python(
        "local_instruction_pointer_moved",
        CALLER
        + """
import ctypes, dis, functools

def _skip(frame):
    returns = [each.offset for each in dis.get_instructions(frame.f_code)
               if each.opname == "LOAD_CONST" and each.argval is None]
    ends = {each.offset for each in dis.get_instructions(frame.f_code) if each.opname == "RETURN_VALUE"}
    target = max(each for each in returns if each + 2 in ends)
    inner = ctypes.c_void_p.from_address(id(frame) + 24).value
    pointer = ctypes.c_void_p.from_address(inner + 56)
    pointer.value = pointer.value - frame.f_lasti + target - 2

for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "@PACKAGE@" and sys.version_info[:2] == (3, 11):
        for _key, _value in [each for each in vars(_module).items() if each[0][:1] != '_']:
            if isinstance(_value, types.FunctionType):
                def _call(*arguments, **named):
                    frame = sys._getframe(1)
                    if frame.f_code.co_name.startswith("test"):
                        _skip(frame)
                    return None
                setattr(_module, _key, _call)
""",
    ),
    python(
        "local_assertion_error_of_the_module",
        CALLER
        + """
class _Fine(Exception):
    def __new__(cls, *arguments):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "pytest_pyfunc_call":
                frame.f_trace = None
            frame = frame.f_back
        return super().__new__(cls)

for _space in _spaces():
    _space["AssertionError"] = _Fine
    _space["assertEqual"] = lambda *arguments: None
""",
    ),
    python(
        "local_generator_tests",
        CALLER
        + """
import inspect
for _space in _spaces():
    def _set_up(*ignored, _space=_space):
        for function in _functions(_space):
            code = function.__code__
            function.__code__ = code.replace(co_flags=code.co_flags | inspect.CO_COROUTINE)
    _space["setUpModule"] = _space["setup_module"] = _set_up
""",
    ),
    python(
        "local_defaults_and_globals",
        CALLER
        + """
import builtins
for _space in _spaces():
    class _Any(int):
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __hash__(self): return 0
    _space["len"] = lambda value: _Any(builtins.len(value))
    _space["list"] = lambda *arguments: type("list", (list,), {"__eq__": lambda self, other: True,
                                                                "__hash__": None})(*arguments)
    _space["sorted"] = _space["list"]
    _space["repr"] = _space["str"] = lambda value: type("str", (str,), {"__eq__": lambda self, other: True,
                                                                        "__hash__": str.__hash__})(value)
""",
    ),
)
