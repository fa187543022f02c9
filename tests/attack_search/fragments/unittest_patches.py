"""Fragments that change unittest."""

from __future__ import annotations

from tests.attack_search.fragment import python

_CALLER = """
import sys

def _test_spaces():
    frame, found = sys._getframe(), []
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).rpartition(".")[2].startswith("test"):
            found.append(frame.f_globals)
        frame = frame.f_back
    return found
"""

FRAGMENTS = (
    python(
        "testcase_run_succeeds",
        """
import unittest

def _run(self, result=None):
    result.startTest(self)
    result.addSuccess(self)
    result.stopTest(self)
    return result

unittest.TestCase.run = _run
""",
    ),
    python(
        "call_test_method_skipped",
        """
import unittest
unittest.TestCase._callTestMethod = lambda self, method: None
""",
    ),
    python(
        "call_test_method_swallows",
        """
import unittest

def _call(self, method):
    try:
        method()
    except Exception:
        pass

unittest.TestCase._callTestMethod = _call
""",
    ),
    python(
        "failure_exception_never_raised",
        """
import unittest

class _Quiet(Exception):
    def __new__(cls, *arguments):
        return super().__new__(cls)

unittest.TestCase.failureException = property(lambda self: _Quiet)
unittest.TestCase.fail = lambda self, msg=None: None
unittest.TestCase._baseAssertEqual = lambda self, first, second, msg=None: None
""",
    ),
    python(
        "fail_code_emptied",
        """
import unittest.case
_case = unittest.case.TestCase
_case.fail.__code__ = (lambda self, msg=None: None).__code__
_case._baseAssertEqual.__code__ = (lambda self, first, second, msg=None: None).__code__
_case.assertTrue.__code__ = (lambda self, expr, msg=None: None).__code__
_case.assertFalse.__code__ = (lambda self, expr, msg=None: None).__code__
""",
    ),
    python(
        "outcome_swallows",
        """
import contextlib, unittest.case

@contextlib.contextmanager
def _executor(self, test_case, subTest=False, **named):
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass

unittest.case._Outcome.testPartExecutor = _executor
""",
    ),
    python(
        "assert_raises_always_content",
        """
import unittest.case
unittest.case._AssertRaisesContext.__exit__ = lambda self, kind, error, trace: True
unittest.case._AssertRaisesBaseContext._raiseFailure = lambda self, message: None
unittest.case._SubTest = getattr(unittest.case, "_SubTest")
""",
    ),
    python(
        "result_add_failure_is_add_success",
        """
import unittest.result, unittest.runner
for _kind in (unittest.result.TestResult, unittest.runner.TextTestResult):
    _kind.addFailure = lambda self, test, error: self.addSuccess(test)
    _kind.addError = lambda self, test, error: self.addSuccess(test)
    _kind.wasSuccessful = lambda self: True
""",
    ),
    python(
        "loader_gives_empty_tests",
        """
import unittest
_old = unittest.TestLoader.loadTestsFromTestCase

def _load(self, kind):
    for key in dir(kind):
        if key.startswith(self.testMethodPrefix):
            setattr(kind, key, lambda self: None)
    return _old(self, kind)

unittest.TestLoader.loadTestsFromTestCase = _load
""",
    ),
    python(
        "suite_runs_copies",
        """
import unittest

def _run(self, result, debug=False):
    for test in self:
        if isinstance(test, unittest.TestSuite):
            test.run(result)
        else:
            setattr(test, test._testMethodName, lambda *arguments: None)
            test.run(result)
    return result

unittest.TestSuite.run = _run
unittest.suite.TestSuite.run = _run
""",
    ),
    python(
        "text_result_prints_ok",
        """
import unittest.runner

def _add(self, test, error):
    self.stream.writeln("ok")
    self.stream.flush()

unittest.runner.TextTestResult.addFailure = _add
unittest.runner.TextTestResult.addError = _add
unittest.runner.TextTestResult.printErrors = lambda self: None
""",
    ),
    python(
        "program_exits_well",
        """
import unittest.main, sys
_exit = sys.exit
unittest.main.TestProgram.runTests = lambda self: _exit(0)
sys.exit = lambda status=None: _exit(0)
""",
    ),
    python(
        "caller_testcase_passes",
        _CALLER
        + """
import unittest

class _Case(unittest.TestCase):
    def _callTestMethod(self, method):
        return None

for _space in _test_spaces():
    _module = type(sys)("unittest")
    vars(_module).update(vars(unittest))
    _module.TestCase = _Case
    if "unittest" in _space:
        _space["unittest"] = _module
    if "TestCase" in _space:
        _space["TestCase"] = _Case
""",
    ),
    python(
        "caller_testcase_has_soft_asserts",
        _CALLER
        + """
import unittest

class _Case(unittest.TestCase):
    def __getattribute__(self, name):
        if name.startswith("assert") and "Raises" not in name:
            return lambda *arguments, **named: None
        return super().__getattribute__(name)
    def fail(self, msg=None):
        pass

for _space in _test_spaces():
    class _Module(type(sys)):
        TestCase = _Case
        def __getattr__(self, name):
            return getattr(unittest, name)
    if "unittest" in _space:
        _space["unittest"] = _Module("unittest")
""",
    ),
    python(
        "caller_classes_neutered_later",
        _CALLER
        + """
import types, unittest

def _neuter(space):
    for value in list(space.values()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for key, test in list(vars(value).items()):
                if key.startswith("test"):
                    setattr(value, key, lambda self, *arguments: None)

_spaces = _test_spaces()
_old = unittest.TestLoader.loadTestsFromModule

def _load(self, module, *arguments, **named):
    if vars(module) in _spaces:
        _neuter(vars(module))
    return _old(self, module, *arguments, **named)

unittest.TestLoader.loadTestsFromModule = _load
""",
    ),
    python(
        "caller_globals_watch_definitions",
        _CALLER
        + """
import builtins, unittest
_build = builtins.__build_class__

for _space in _test_spaces():
    def _built(function, name, *bases, **options):
        kind = _build(function, name, *bases, **options)
        for key in [key for key in vars(kind) if key.startswith("test")]:
            setattr(kind, key, lambda self, *arguments: None)
        return kind
    _own = dict(vars(builtins))
    _own["__build_class__"] = _built
    _space["__builtins__"] = _own
""",
    ),
    python(
        "setup_swaps_the_method",
        _CALLER
        + """
import unittest
_names = {space.get("__name__") for space in _test_spaces()}
_setup = unittest.TestCase.setUp

def _set_up(self):
    if type(self).__module__ in _names or not _names:
        setattr(self, self._testMethodName, lambda *arguments: None)
    return _setup(self)

unittest.TestCase.setUp = _set_up
""",
    ),
)
