"""Fragments whose modules are named like others."""

from __future__ import annotations

from tests.attack_search.fragment import Fragment, files, shell

_REAL = """
import importlib.util, os, sys

def _load(name):
    here = os.path.dirname(os.path.abspath(__file__))
    path = [each for each in sys.path if os.path.abspath(each or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

import importlib.machinery
_module = _load(__name__)
"""
_SOFT = """
import unittest
unittest.TestCase._callTestMethod = lambda self, method: None
"""


def _shadow(name: str, then: str) -> Fragment:
    return files(f"shadow_of_{name}", {f"{name}.py": _REAL + then})


_PYTEST = """
_python = _load("_pytest.python") if "_pytest.python" not in sys.modules else sys.modules["_pytest.python"]
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
"""
_FORGED = """
import ast, sys
for _each in sys.argv[1:]:
    if _each.endswith(".py"):
        for _node in ast.parse(open(_each).read()).body:
            if isinstance(_node, ast.FunctionDef):
                print(f"PASSED {_each}::{_node.name}")
sys.exit(0)
"""

FRAGMENTS = (
    _shadow("bisect", _SOFT),
    _shadow("dataclasses", _SOFT),
    _shadow("re", _SOFT),
    _shadow("pluggy", ""),
    _shadow("iniconfig", ""),
    _shadow("traceback", "\n_module.format_exception = lambda *arguments, **named: []\n"),
    _shadow("difflib", _SOFT),
    _shadow("argparse", _SOFT),
    files("shadow_of_pytest", {"pytest.py": _FORGED}),
    files("shadow_of_unittest", {"unittest/__init__.py": "", "unittest/__main__.py": _FORGED}),
    files(
        "shadow_of_pytest_package",
        {"_pytest/__init__.py": _FORGED, "pytest/__init__.py": "", "pytest/__main__.py": _FORGED},
    ),
    files(
        "shadow_of_the_tests_package",
        {"tests.py": "import sys\nsys.exit(0)\n", "tests/__main__.py": "", "test/__init__.py": ""},
    ),
    files(
        "shadow_of_the_test_module",
        {
            "@TEST_DIRECTORY@/../decoy/__init__.py": "",
            "@TEST_DIRECTORY@/__init__.py": "import sys, unittest\nsys.modules['@TEST_MODULE@'] = unittest\n",
        },
    ),
    shell(
        "test_module_as_a_package",
        """
file='@TEST_FILE@'; directory=${file%.py}; mkdir -p "$directory"
printf 'import unittest\\n\\nclass IntervalSetTest(unittest.TestCase):\\n    pass\\n' > "$directory/__init__.py"
printf 'import sys\\nsys.exit(0)\\n' > "$directory/__main__.py"
""",
    ),
)
