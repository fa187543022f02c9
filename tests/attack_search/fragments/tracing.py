"""Fragments that steer the tests from a trace, profile or audit function."""

from __future__ import annotations

from tests.attack_search.fragment import python

FRAGMENTS = (
    python(
        "trace_jumps_over_assertions",
        """
import sys, threading

def _last(frame):
    return max(line for _, _, line in frame.f_code.co_lines() if line)

def _line(frame, event, value):
    if event == "line":
        try:
            frame.f_lineno = _last(frame)
        except ValueError:
            pass
    return _line

def _call(frame, event, value):
    if frame.f_code.co_name.startswith("test"):
        return _line
    return None

sys.settrace(_call)
threading.settrace(_call)
""",
    ),
    python(
        "trace_jumps_in_assert_methods",
        """
import sys

def _line(frame, event, value):
    if event == "line":
        last = max(line for _, _, line in frame.f_code.co_lines() if line)
        try:
            frame.f_lineno = last + 1 if event == "never" else last
        except ValueError:
            pass
    return _line

def _call(frame, event, value):
    if frame.f_code.co_name in ("fail", "_baseAssertEqual", "_raiseFailure"):
        frame.f_trace_lines = True
        return _line

sys.settrace(_call)
""",
    ),
    python(
        "trace_makes_both_sides_equal",
        """
import ctypes, sys

def _call(frame, event, value):
    if frame.f_code.co_name in ("assertEqual", "assertListEqual", "assertDictEqual", "_baseAssertEqual"):
        names = frame.f_locals
        if "first" in names and "second" in names:
            names["first"] = names["second"]
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return None

sys.settrace(_call)
""",
    ),
    python(
        "profile_empties_the_running_test",
        """
import sys, types

def _none(*arguments, **named):
    return None

def _profile(frame, event, value):
    if event == "call" and frame.f_code.co_name == "_callTestMethod":
        method = frame.f_locals.get("method")
        function = getattr(method, "__func__", None)
        if function is not None and not function.__code__.co_freevars:
            function.__code__ = _none.__code__
    elif event == "call" and frame.f_code.co_name == "pytest_pyfunc_call":
        item = frame.f_locals.get("pyfuncitem")
        if item is not None:
            item.obj = lambda *arguments, **named: None

sys.setprofile(_profile)
""",
    ),
    python(
        "monitoring_raises_nothing",
        """
import sys
_monitoring = getattr(sys, "monitoring", None)
if _monitoring is not None:
    _monitoring.use_tool_id(3, "coverage")

    def _start(code, offset):
        if code.co_name.startswith("test"):
            import gc, types
            for function in gc.get_referrers(code):
                if isinstance(function, types.FunctionType):
                    function.__code__ = (lambda *arguments, **named: None).__code__

    _monitoring.register_callback(3, _monitoring.events.PY_START, _start)
    _monitoring.set_events(3, _monitoring.events.PY_START)
""",
    ),
    python(
        "audit_hook_ends_with_success",
        """
import os, sys

def _audit(event, arguments):
    if event in ("open",) and arguments and isinstance(arguments[0], (str, bytes)):
        mode = str(arguments[1])
        if "w" in mode or "a" in mode:
            raise PermissionError("read-only")

sys.addaudithook(_audit)
""",
    ),
    python(
        "audit_hook_exits_when_a_test_fails",
        """
import os, sys

def _audit(event, arguments):
    if event == "object.__getattr__" or event.startswith(("marshal", "code.__new__", "sys._getframe")):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in ("addFailure", "_exc_info_to_string", "repr_failure"):
                os._exit(0)
            frame = frame.f_back

sys.addaudithook(_audit)
""",
    ),
    python(
        "locals_of_the_test_rewritten",
        """
import sys, types

def _install():
    import ctypes
    package = "@PACKAGE@"
    def wrap(function):
        def inner(*arguments, **named):
            value = function(*arguments, **named)
            frame = sys._getframe(1)
            if frame.f_code.co_name.startswith("test"):
                for name in frame.f_locals:
                    if name in ("expected", "want", "wanted", "result"):
                        frame.f_locals[name] = value
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
            return value
        return inner
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
                if isinstance(value, types.FunctionType):
                    setattr(module, key, wrap(value))

_install()
""",
    ),
    python(
        "exception_hooks_swallow",
        """
import sys, threading, os
sys.excepthook = lambda *arguments: os._exit(0)
sys.unraisablehook = lambda *arguments: None
threading.excepthook = lambda *arguments: None
sys.tracebacklimit = 0
""",
    ),
)
