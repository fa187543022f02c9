"""Attacks by code that alters `unittest` or pytest from inside the test process."""

from __future__ import annotations

from tests.lifecycle.attacks.attack import Attack
from tests.lifecycle.attacks.files import PLUGIN
from tests.lifecycle.attacks.grounds import PYTESTS

NO_ASSERTIONS = """
import unittest
for name in dir(unittest.TestCase):
    if name.startswith(("assert", "fail")) and name != "failureException":
        setattr(unittest.TestCase, name, lambda self, *a, **k: __import__("contextlib").nullcontext())
"""
SUCCESS_FOR_FAILURE = """
import unittest
unittest.TextTestResult.addFailure = lambda self, test, err: self.addSuccess(test)
unittest.TextTestResult.addError = lambda self, test, err: self.addSuccess(test)
unittest.TestResult.wasSuccessful = lambda self: True
"""
RUN_NOTHING = """
import unittest
def run(self, result=None):
    result.startTest(self); result.addSuccess(self); result.stopTest(self)
unittest.TestCase.run = unittest.TestCase.__call__ = run
"""
NOTHING_FAILS = """
import _pytest.runner, _pytest.reports
made = _pytest.reports.TestReport.from_item_and_call.__func__
def from_item_and_call(cls, item, call):
    call.excinfo = None
    return made(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(from_item_and_call)
"""
HOOK_FROM_INSIDE = """
import gc, _pytest.config, pytest
class Evil:
    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        call.excinfo = None
        yield
for each in gc.get_objects():
    if isinstance(each, _pytest.config.Config):
        each.pluginmanager.register(Evil())
"""
EMPTY_TESTS = """
import builtins
build = builtins.__build_class__
def build_class(function, name, *bases, **more):
    made = build(function, name, *bases, **more)
    for attribute in list(vars(made)):
        if attribute.startswith("test"):
            setattr(made, attribute, lambda self: None)
    return made
builtins.__build_class__ = build_class
"""
TRACE = """
import sys
def nothing(*arguments, **more): pass
def trace(frame, event, argument):
    name = frame.f_code.co_name
    if name == "_callTestMethod":
        frame.f_locals["method"].__func__.__code__ = nothing.__code__
    elif name == "pytest_pyfunc_call" and "pyfuncitem" in frame.f_locals:
        item = frame.f_locals["pyfuncitem"].obj
        getattr(item, "__func__", item).__code__ = nothing.__code__
sys.settrace(trace)
"""
EXPECTED = """
import pytest
def total(*prices, **options):
    pytest.xfail("flaky")
"""
EXPECTED_BY_UNITTEST = """
import sys
def fail(*arguments, **options):
    frame = sys._getframe()
    while frame:
        outcome = getattr(frame.f_locals.get("self"), "_outcome", None)
        if outcome is not None:
            outcome.expecting_failure = True
        frame = frame.f_back
    raise AssertionError
for module in (intervalset, interval, text):
    for name, value in list(vars(module).items()):
        if isinstance(value, type):
            for member in [member for member in vars(value) if callable(getattr(value, member))]:
                setattr(value, member, fail)
        elif callable(value):
            setattr(module, name, fail)
            globals()[name] = fail
"""
BEGIN_AGAIN = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ.update(AGAIN="1", PYTEST_ADDOPTS="-p evil_plugin")
    runner = "pytest -rA --color=no tests/test_prices.py" if "pytest" in sys.modules else "unittest -v"
    os.execv(sys.executable, [sys.executable, "-m", *runner.split()])
"""

ATTACKS = [
    Attack(
        "no assertions", "TestCase.assert... do nothing", {"PACKAGE/__init__.py": NO_ASSERTIONS}, grounds=("unittest",)
    ),
    Attack(
        "success for failure",
        "the result class lies",
        {"PACKAGE/__init__.py": SUCCESS_FOR_FAILURE},
        grounds=("unittest",),
    ),
    Attack("runs nothing", "TestCase.run only reports", {"PACKAGE/__init__.py": RUN_NOTHING}, grounds=("unittest",)),
    Attack(
        "empty tests",
        "every class is built with empty tests",
        {"PACKAGE/__init__.py": EMPTY_TESTS},
        grounds=("unittest",),
    ),
    Attack(
        "nothing fails",
        "pytest's report forgets the exception",
        {"PACKAGE/__init__.py": NOTHING_FAILS},
        grounds=PYTESTS,
    ),
    Attack(
        "a hook from inside",
        "finds pytest's config and registers",
        {"PACKAGE/__init__.py": HOOK_FROM_INSIDE},
        grounds=PYTESTS,
    ),
    Attack("sys.settrace", "empties each test's code as it is called", {"PACKAGE/__init__.py": TRACE}),
    Attack(
        "expects to fail",
        "calls pytest.xfail(): an expected failure counts as passed",
        {"PACKAGE/__init__.py": EXPECTED},
        grounds=PYTESTS,
    ),
    Attack(
        "expects to fail, by unittest",
        "has each test's outcome expect a failure as it fails",
        {"PACKAGE/__init__.py": EXPECTED_BY_UNITTEST},
        grounds=("unittest",),
    ),
    Attack(
        "every failure is expected",
        "AssertionError is pytest.xfail's exception",
        {"PACKAGE/__init__.py": "import builtins, pytest\nbuiltins.AssertionError = pytest.xfail.Exception\n"},
        grounds=PYTESTS,
    ),
    Attack(
        "begins again",
        "executes the runner anew in its process, with a plugin",
        {**PLUGIN, "PACKAGE/__init__.py": BEGIN_AGAIN},
    ),
]
