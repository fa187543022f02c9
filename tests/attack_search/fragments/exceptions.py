"""Fragments whose exceptions masquerade as something else."""

from __future__ import annotations

from tests.attack_search.fragment import Fragment, python

_EVERYWHERE = """
import sys, types

def _raising():
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "@PACKAGE@":
            for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
                if isinstance(value, types.FunctionType):
                    setattr(module, key, _stop)
                elif isinstance(value, type) and value.__module__.startswith("@PACKAGE@"):
                    if not issubclass(value, BaseException):
                        value.__init__ = _stop
"""


def _always(name: str, setup: str, raised: str) -> Fragment:
    """Return the fragment in which every function of the package raises."""
    stop = f"\n{setup}\ndef _stop(*arguments, **named):\n    raise {raised}\n\n_raising()\n"
    return python(f"every_call_raises_{name}", _EVERYWHERE + stop)


FRAGMENTS = (
    _always("skip", "import unittest", "unittest.SkipTest('not on this machine')"),
    _always("system_exit", "", "SystemExit(0)"),
    _always("keyboard_interrupt", "", "KeyboardInterrupt"),
    _always("generator_exit", "", "GeneratorExit"),
    _always("pytest_skip", "", "__import__('_pytest.outcomes', fromlist=['x']).Skipped('no')"),
    _always("pytest_exit", "", "__import__('_pytest.outcomes', fromlist=['x']).Exit('done', 0)"),
    _always("pytest_xfail", "", "__import__('_pytest.outcomes', fromlist=['x']).XFailed('known')"),
    _always("should_stop", "from unittest.case import _ShouldStop", "_ShouldStop"),
    _always("expected_failure", "", "__import__('unittest.case', fromlist=['x'])._UnexpectedSuccess"),
    _always(
        "without_traceback",
        "class _Odd(AssertionError):\n    __str__ = __repr__ = lambda self: 1 / 0\n"
        "    __traceback__ = property(lambda self: None)\n",
        "_Odd",
    ),
    _always("exception_group", "", "BaseExceptionGroup('all', [SystemExit(0), KeyboardInterrupt()])"),
    python("import_raises_skip", "import unittest\nraise unittest.SkipTest('no')\n"),
    python(
        "import_raises_pytest_skip",
        "import pytest\npytest.skip('no', allow_module_level=True)\n",
    ),
    python(
        "caller_marked_as_expected_failure",
        """
import sys
_frame = sys._getframe()
while _frame is not None:
    _space = _frame.f_globals
    if str(_space.get("__name__", "")).rpartition(".")[2].startswith("test"):
        try:
            import pytest
            _space["pytestmark"] = [pytest.mark.xfail(strict=False)]
        except ImportError:
            pass
        _space["__unittest_skip__"] = True
    _frame = _frame.f_back
import unittest
unittest.TestCase.__unittest_expecting_failure__ = True
""",
    ),
    python(
        "assertion_error_is_a_skip",
        """
import builtins, unittest
class _Skipped(unittest.SkipTest, AssertionError):
    pass
unittest.TestCase.failureException = _Skipped
builtins.AssertionError = _Skipped
""",
    ),
)
