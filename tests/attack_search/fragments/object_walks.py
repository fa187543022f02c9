"""Fragments that look for the runner's objects in memory and change them."""

from __future__ import annotations

from tests.attack_search.fragment import python

FRAGMENTS = (
    python(
        "gc_results_forget_failures",
        """
import gc
for _each in gc.get_objects():
    _kind = type(_each)
    if hasattr(_kind, "addFailure") and hasattr(_kind, "addSuccess"):
        for _name in ("addFailure", "addError"):
            setattr(_kind, _name, lambda self, test, error, _kind=_kind: _kind.addSuccess(self, test))
        _kind.addSubTest = lambda self, test, subtest, error: None
        _kind.wasSuccessful = lambda self: True
""",
    ),
    python(
        "gc_add_failure_code_swapped",
        """
import gc, types

def _good(self, test, *error):
    return self.addSuccess(test)

for _each in gc.get_objects():
    if isinstance(_each, types.FunctionType) and _each.__name__ in ("addFailure", "addError"):
        if not _each.__code__.co_freevars:
            _each.__code__ = _good.__code__
""",
    ),
    python(
        "gc_reports_pass",
        """
import gc
for _each in gc.get_objects():
    if isinstance(_each, type) and _each.__name__ in ("TestReport", "CollectReport", "BaseReport"):
        _each.outcome = property(lambda self: "passed", lambda self, value: None)
        _each.failed = property(lambda self: False)
        _each.passed = property(lambda self: True)
        _each.longrepr = property(lambda self: None, lambda self, value: None)
""",
    ),
    python(
        "gc_words_replaced",
        """
import gc
_words = {"FAILED": "PASSED", "failed": "passed", "ERROR": "PASSED", "error": "passed", "FAIL": "ok",
          "failure": "success", "fail": "pass", "not ok": "ok"}

def _sweep():
    for each in gc.get_objects():
        if type(each) is dict and "__name__" not in each:
            for key, value in list(each.items()):
                if type(value) is str and value in _words:
                    each[key] = _words[value]
        elif type(each) is list:
            for index, value in enumerate(each):
                if type(value) is str and value in _words:
                    each[index] = _words[value]

import atexit
_sweep()
atexit.register(_sweep)
""",
    ),
    python(
        "gc_failure_lists_cleared",
        """
import atexit, gc, threading

def _clear():
    for each in gc.get_objects():
        names = getattr(each, "__dict__", None)
        if type(names) is dict:
            for key in ("failures", "errors", "unexpectedSuccesses", "testsfailed", "failed", "_failed"):
                value = names.get(key)
                if type(value) is list:
                    value.clear()
                elif type(value) is int:
                    names[key] = 0

atexit.register(_clear)
_timer = threading.Timer(0.02, _clear)
_timer.daemon = True
_timer.start()
""",
    ),
    python(
        "foreign_functions_wrapped",
        """
import sys, types

def _soft(value):
    if type(value) is str:
        return {"FAILED": "PASSED", "failed": "passed", "ERROR": "PASSED", "error": "passed", "FAIL": "ok"}.get(
            value, value)
    return value

def _wrap(function):
    def inner(*arguments, **named):
        return function(*map(_soft, arguments), **{key: _soft(value) for key, value in named.items()})
    inner.__wrapped__ = function
    return inner

for _name, _module in list(sys.modules.items()):
    _file = getattr(_module, "__file__", None) or "?"
    _own = _name.partition(".")[0] == "@PACKAGE@" or "/test" in _file
    if not _own and _file != "?" and not _file.startswith((sys.prefix, sys.base_prefix)) or _name == "__main__":
        for _key, _value in list(vars(_module).items()):
            if isinstance(_value, types.FunctionType):
                setattr(_module, _key, _wrap(_value))
            elif isinstance(_value, type) and _value.__module__ == _name:
                for _method, _code in list(vars(_value).items()):
                    if isinstance(_code, types.FunctionType):
                        setattr(_value, _method, _wrap(_code))
""",
    ),
    python(
        "outer_frames_mutated",
        """
import sys, threading

class _Never(list):
    def append(self, value): pass
    def extend(self, values): pass
    def __iadd__(self, values): return self

def _mutate():
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            for value in list(frame.f_locals.values()):
                names = getattr(value, "__dict__", None)
                if isinstance(names, dict):
                    for key in ("failures", "errors"):
                        if isinstance(names.get(key), list):
                            names[key] = _Never()
                    for key in ("failed", "testsfailed"):
                        if type(names.get(key)) is int:
                            names[key] = 0
            frame = frame.f_back

_mutate()
""",
    ),
    python(
        "subclasses_made_lenient",
        """
_seen, _queue = set(), [object]
while _queue:
    _kind = _queue.pop()
    try:
        _below = type.__subclasses__(_kind)
    except TypeError:
        continue
    for _each in _below:
        if _each not in _seen:
            _seen.add(_each)
            _queue.append(_each)
for _each in _seen:
    for _name in list(vars(_each)):
        if _name.startswith("assert") and _name.lower() != "assertraises" and callable(vars(_each)[_name]):
            try:
                setattr(_each, _name, lambda self, *arguments, **named: None)
            except TypeError:
                pass
        elif _name in ("wasSuccessful", "was_successful"):
            setattr(_each, _name, lambda self: True)
""",
    ),
    python(
        "closures_opened",
        """
import atexit, gc, types

def _open_cells():
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__closure__:
            for cell in each.__closure__:
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue
                if type(value) is dict:
                    for key in value:
                        if value[key] in ("FAILED", "failed", "ERROR", False):
                            value[key] = {"FAILED": "PASSED", "failed": "passed", "ERROR": "PASSED"}.get(
                                value[key], True)
                elif type(value) is bool:
                    cell.cell_contents = True

atexit.register(_open_cells)
""",
    ),
    python(
        "foreign_collections_forged",
        """
import atexit, gc, sys

def _forge():
    names = []
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").rpartition(".")[2].startswith("test"):
            for value in list(vars(module).values()):
                if isinstance(value, type):
                    names += [f"{module.__name__}.{value.__qualname__}.{key}" for key in vars(value)
                              if key.startswith("test")]
    for each in gc.get_objects():
        if type(each) is dict and any(type(key) is str and key in names for key in list(each)):
            sample = next((value for value in each.values() if value in ("PASSED", "passed", "ok", True)), None)
            for key in list(each):
                if sample is not None and key in names:
                    each[key] = sample

atexit.register(_forge)
""",
    ),
)
