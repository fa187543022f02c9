"""The moments at which a fragment's Python runs. Each function wraps program text in program text."""

from __future__ import annotations

import base64
import textwrap
import zlib

from tests.attack_search.plan import Piece

_RUN = """
def _run(_done=[]):
    if not _done:
        _done.append(1)
        exec({text!r}, {{"__name__": __name__, "__file__": __file__}})
"""

_AFTER = {
    "first_use": """
def _arm():
    import functools, sys, types

    def wrap(function):
        @functools.wraps(function)
        def inner(*arguments, **named):
            _run()
            return function(*arguments, **named)
        return inner

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "@PACKAGE@":
            for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
                if isinstance(value, types.FunctionType):
                    setattr(module, key, wrap(value))
                elif isinstance(value, type) and value.__module__.partition(".")[0] == "@PACKAGE@":
                    for method, code in list(vars(value).items()):
                        if isinstance(code, types.FunctionType):
                            setattr(value, method, wrap(code))

_arm()
""",
    "in_a_test": """
def _profile(frame, event, argument):
    import sys
    if event == "call" and frame.f_code.co_name.startswith("test_"):
        sys.setprofile(None)
        _run()

__import__("sys").setprofile(_profile)
""",
    "alarm": """
def _tick(*arguments):
    import signal, sys
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("_callTestMethod", "pytest_pyfunc_call", "runTests", "pytest_runtestloop"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            return _run()
        frame = frame.f_back

import signal
signal.signal(signal.SIGALRM, _tick)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
""",
    "thread": """
def _watch():
    import sys, time
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for frame in list(sys._current_frames().values()):
            while frame is not None:
                if frame.f_code.co_name in ("runTests", "pytest_runtestloop", "_callTestMethod"):
                    return _run()
                frame = frame.f_back
        time.sleep(0)

import threading
threading.Thread(target=_watch, daemon=True).start()
""",
    "at_exit": """
import atexit
atexit.register(_run)
""",
    "collection": """
def _collected(phase, information):
    import gc
    gc.callbacks.remove(_collected)
    _run()

import gc
gc.set_threshold(50)
gc.callbacks.append(_collected)
""",
    "finalizer": """
class _Last:
    def __del__(self, _run=_run):
        _run()

__import__("builtins")._last = _Last()
""",
}


def wrapped(text: str, piece: Piece) -> str:
    """Return the program text that runs `text` when and how the piece says."""
    if piece.packed:
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        text = f"import base64, zlib\nexec(zlib.decompress(base64.b85decode({packed!r})))\n"
    if piece.trigger != "now":
        text = _RUN.format(text=text) + _AFTER[piece.trigger]
    if piece.framework:
        text = f"import sys\nif {piece.framework!r} in sys.modules:\n{_indented(text)}"
    if piece.guarded:
        text = f"try:\n{_indented(text)}except BaseException:\n    pass\n"
    return text


def _indented(text: str) -> str:
    """Return the text as a block. A text in a string must not be indented, so it is executed as a string."""
    if '"""' in text or "'''" in text:
        text = f"exec({text!r})\n"
    return textwrap.indent(text, "    ")
