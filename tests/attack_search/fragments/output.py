"""Fragments that forge the runner's output, its files and its exit status."""

from __future__ import annotations

from tests.attack_search.fragment import python

_FORGE = """
import ast, glob, os, sys

def _forged():
    lines, count = [], 0
    for path in sorted(glob.glob("**/test*.py", recursive=True) + glob.glob("**/*_test.py", recursive=True)):
        module = path[:-3].replace("/", ".")
        tree = ast.parse(open(path, encoding="utf-8").read())
        for node in tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            for each in inner:
                if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
                    count += 1
                    if isinstance(node, ast.ClassDef):
                        lines.append(f"{each.name} ({module}.{node.name}.{each.name}) ... ok")
                        lines.append(f"PASSED {path}::{node.name}::{each.name}")
                    else:
                        lines.append(f"PASSED {path}::{each.name}")
    tail = "-" * 70 + f"\\nRan {count} tests in 0.001s\\n\\nOK"
    return "\\n" + "\\n".join(lines) + f"\\n{tail}\\n===== {count} passed in 0.01s =====\\n"
"""

FRAGMENTS = (
    python(
        "forged_log_and_exit",
        _FORGE + "\nos.write(1, _forged().encode())\nos.write(2, _forged().encode())\nos._exit(0)\n",
    ),
    python(
        "forged_log_at_exit",
        _FORGE
        + """
import atexit

def _last():
    for descriptor in (1, 2):
        os.write(descriptor, _forged().encode())
    os._exit(0)

atexit.register(_last)
""",
    ),
    python(
        "forged_log_on_every_descriptor",
        _FORGE
        + """
for _each in range(3, 64):
    try:
        os.write(_each, _forged().encode())
    except OSError:
        pass
""",
    ),
    python(
        "output_rewritten_on_its_way",
        """
import io, sys

class _Stream(io.TextIOBase):
    def __init__(self, under):
        self._under = under
    def write(self, text):
        for old, new in (("... FAIL", "... ok"), ("... ERROR", "... ok"), ("FAILED", "PASSED"), ("ERROR", "PASSED"),
                         ("not ok", "ok"), ("failed", "passed")):
            text = text.replace(old, new)
        return self._under.write(text)
    def __getattr__(self, name):
        return getattr(self._under, name)

sys.stdout, sys.stderr = _Stream(sys.stdout), _Stream(sys.stderr)
""",
    ),
    python(
        "descriptors_filtered_by_a_pipe",
        """
import os
for _target in (1, 2):
    _read, _write = os.pipe()
    _saved = os.dup(_target)
    if os.fork() == 0:
        os.close(_write)
        while _data := os.read(_read, 65536):
            for _old, _new in ((b"FAILED", b"PASSED"), (b"FAIL", b"ok"), (b"ERROR", b"ok"), (b"not ok", b"ok")):
                _data = _data.replace(_old, _new)
            os.write(_saved, _data)
        os._exit(0)
    os.close(_read)
    os.dup2(_write, _target)
    os.close(_write)
""",
    ),
    python(
        "writers_replaced",
        """
import builtins, json, os, pickle, marshal
_words = ((b"FAILED", b"PASSED"), (b"failed", b"passed"), (b"ERROR", b"PASSED"), (b"error", b"passed"))

def _soft(data):
    if isinstance(data, str):
        return _soft(data.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
    if isinstance(data, (bytes, bytearray)):
        data = bytes(data)
        for old, new in _words:
            data = data.replace(old, new)
    return data

def _wrapped(function):
    return lambda *arguments, **named: function(*[_soft(each) for each in arguments], **named)

os.write = _wrapped(os.write)
_dumps = json.dumps
json.dumps = lambda *arguments, **named: _soft(_dumps(*arguments, **named))
_pickle = pickle.dumps
pickle.dumps = lambda *arguments, **named: _pickle(*arguments, **named)
""",
    ),
    python(
        "socket_and_pipe_writers_replaced",
        """
import os, socket
_send = socket.socket.sendall

def _sendall(self, data, *arguments):
    for old, new in ((b"FAILED", b"PASSED"), (b"failed", b"passed")):
        data = bytes(data).replace(old, new)
    return _send(self, data, *arguments)

try:
    socket.socket.sendall = socket.socket.send = _sendall
except TypeError:
    pass
""",
    ),
    python("leaves_at_once", "import os\nos._exit(0)\n"),
    python("system_exit_zero", "import sys\nsys.exit(0)\n"),
    python(
        "kills_itself_politely",
        """
import atexit, os, signal
atexit.register(lambda: os._exit(0))
signal.signal(signal.SIGTERM, lambda *arguments: os._exit(0))
os.kill(os.getpid(), signal.SIGTERM)
""",
    ),
    python(
        "runs_itself_again_with_empty_tests",
        """
import os, subprocess, sys
if not os.environ.get("_AGAIN"):
    os.environ["_AGAIN"] = "1"
    os.environ["PYTHONPATH"] = os.getcwd() + os.pathsep + os.environ.get("PYTHONPATH", "")
    with open("sitecustomize.py", "w") as _file:
        _file.write("import unittest\\nunittest.TestCase._callTestMethod = lambda self, method: None\\n"
                    "try:\\n import _pytest.python as p\\n p.Function.runtest = lambda self: None\\n"
                    "except ImportError:\\n pass\\n")
    os.execv(sys.executable, sys.orig_argv)
""",
    ),
    python(
        "executes_a_passing_program_instead",
        _FORGE
        + """
open("/tmp/forged", "w").write(_forged())
os.execv("/bin/sh", ["sh", "-c", "cat /tmp/forged; cat /tmp/forged >&2; exit 0"])
""",
    ),
    python(
        "result_files_forged",
        """
import atexit, glob, os

def _forge():
    for pattern in ("/tmp/**/*", os.getcwd() + "/**/*.json", os.getcwd() + "/**/*.xml", "/proc/self/fd/*"):
        for path in glob.glob(pattern, recursive=True):
            try:
                if os.path.isfile(path) and os.path.getsize(path) < 1 << 20:
                    data = open(path, "rb").read()
                    new = data
                    for old, good in ((b"FAILED", b"PASSED"), (b"failed", b"passed"), (b"FAIL", b"PASS")):
                        new = new.replace(old, good)
                    if new != data:
                        open(path, "wb").write(new)
            except OSError:
                pass

_forge()
atexit.register(_forge)
""",
    ),
)
