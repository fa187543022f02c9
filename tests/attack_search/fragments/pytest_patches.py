"""Fragments that change pytest, its plugins and its hooks."""

from __future__ import annotations

from tests.attack_search.fragment import files, python

_MANAGER = """
import gc, sys

def _managers():
    return [each for each in gc.get_objects() if type(each).__name__ == "PytestPluginManager"]
"""

FRAGMENTS = (
    python(
        "call_info_without_exception",
        """
import sys
_runner = sys.modules.get("_pytest.runner")
if _runner is not None:
    _from_call = _runner.CallInfo.from_call.__func__
    def _from(cls, func, when, reraise=None):
        def quiet():
            try:
                return func()
            except Exception:
                return None
        return _from_call(cls, quiet, when, reraise)
    _runner.CallInfo.from_call = classmethod(_from)
""",
    ),
    python(
        "function_runtest_skipped",
        """
import sys
_python = sys.modules.get("_pytest.python")
if _python is not None:
    _python.Function.runtest = lambda self: None
""",
    ),
    python(
        "pytest_plugin_registered_late",
        _MANAGER
        + """
import types

def _pyfunc_call(pyfuncitem):
    return True

def _report(item, call):
    call.excinfo = None

def _status(report):
    return ("passed", ".", "PASSED")

for _manager in _managers():
    _plugin = types.ModuleType("pytest_compat")
    _plugin.pytest_pyfunc_call = _pyfunc_call
    _plugin.pytest_runtest_makereport = _report
    _plugin.pytest_report_teststatus = _status
    for _each in (_pyfunc_call, _report, _status):
        _each.pytest_impl = {"tryfirst": True, "hookwrapper": False, "wrapper": False, "trylast": False,
                             "optionalhook": False, "specname": None}
    _manager.register(_plugin)
""",
    ),
    python(
        "pytest_hook_executor_replaced",
        _MANAGER
        + """
for _manager in _managers():
    _inner = _manager._inner_hookexec

    def _execute(name, implementations, arguments, first, _inner=_inner):
        if name == "pytest_pyfunc_call":
            return True
        result = _inner(name, implementations, arguments, first)
        if name == "pytest_runtest_makereport":
            result.outcome, result.longrepr = "passed", None
        return result

    _manager._inner_hookexec = _execute
""",
    ),
    python(
        "report_from_item_passes",
        """
import sys
_reports = sys.modules.get("_pytest.reports")
if _reports is not None:
    _old = _reports.TestReport.from_item_and_call.__func__
    def _make(cls, item, call):
        call.excinfo = None
        return _old(cls, item, call)
    _reports.TestReport.from_item_and_call = classmethod(_make)
""",
    ),
    python(
        "session_counts_no_failure",
        """
import atexit, gc
for _each in gc.get_objects():
    if type(_each).__name__ == "Session" and hasattr(_each, "testsfailed"):
        type(_each).testsfailed = property(lambda self: 0, lambda self, value: None)
        type(_each).exitstatus = property(lambda self: 0, lambda self, value: None)
    if type(_each).__name__ == "TerminalReporter":
        _each.stats.pop("failed", None)
""",
    ),
    python(
        "assertion_rewriting_softened",
        """
import ast, sys
_rewrite = sys.modules.get("_pytest.assertion.rewrite")
if _rewrite is not None:
    def _soft(module, source, path=None, config=None):
        for node in ast.walk(module):
            if isinstance(node, ast.Assert):
                node.test = ast.copy_location(ast.Constant(True), node.test)
    _rewrite.rewrite_asserts = _soft
""",
    ),
    python(
        "items_of_the_session_replaced",
        """
import gc
for _each in gc.get_objects():
    if type(_each).__name__ == "Function" and hasattr(_each, "funcargs") and hasattr(_each, "nodeid"):
        _each.obj = (lambda **named: None)
        try:
            _each._obj = _each.obj
        except AttributeError:
            pass
""",
    ),
    python(
        "collected_functions_emptied_on_use",
        """
import sys, types

def _empty():
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2].startswith("test_"):
            for key, value in list(vars(module).items()):
                if key.startswith("test") and isinstance(value, types.FunctionType):
                    code = value.__code__
                    blank = compile(f"def {key}({', '.join(code.co_varnames[:code.co_argcount])}): pass", "", "exec")
                    value.__code__ = blank.co_consts[0]

_empty()
""",
    ),
    python(
        "fixtures_give_equal_objects",
        """
import sys
_fixtures = sys.modules.get("_pytest.fixtures")
if _fixtures is not None:
    class _Any(list):
        def __eq__(self, other): return True
        __hash__ = None
    _old = _fixtures.call_fixture_func
    def _call(function, request, named):
        value = _old(function, request, named)
        return _Any(value) if isinstance(value, list) else value
    _fixtures.call_fixture_func = _call
""",
    ),
    files(
        "conftest_hooks",
        {
            "conftest.py": """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"
    report.longrepr = None

def pytest_sessionfinish(session, exitstatus):
    session.exitstatus = 0
"""
        },
    ),
    files(
        "conftest_marks_all_xfail",
        {
            "@TEST_DIRECTORY@/conftest.py": """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xfail(strict=False))

def pytest_report_teststatus(report, config):
    if report.when == "call":
        return "passed", ".", "PASSED"
"""
        },
    ),
    files(
        "conftest_replaces_collection",
        {
            "conftest.py": """
import ast, pytest

class _Item(pytest.Item):
    def runtest(self):
        pass
    def reportinfo(self):
        return self.path, 0, self.name

class _File(pytest.File):
    def collect(self):
        for node in ast.parse(self.path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield _Item.from_parent(self, name=node.name)

def pytest_collect_file(file_path, parent):
    if file_path.name.startswith("test"):
        return _File.from_parent(parent, path=file_path)

def pytest_pycollect_makemodule(module_path, parent):
    return _File.from_parent(parent, path=module_path)
"""
        },
    ),
    files(
        "conftest_pytest_plugins",
        {
            "conftest.py": "\npytest_plugins = ['@PACKAGE@_plugin']\n",
            "@PACKAGE@_plugin.py": """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.obj = lambda **named: None
    item.runtest = lambda: None
""",
        },
    ),
)
