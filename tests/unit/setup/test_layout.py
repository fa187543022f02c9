"""The layout of the tests: unit tests mirror the rooms, and shared helpers lie in modules that hold no tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*(?:from tests\S*\.test_|from tests\S* import test_|import tests\S*\.test_)", re.MULTILINE)


def test_no_test_module_is_imported_by_another_module() -> None:
    modules = {path.relative_to(TESTS): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    assert [str(name) for name, text in modules.items() if IMPORT.search(text)] == []


def test_unit_tests_mirror_the_rooms() -> None:
    rooms = {path.parent.name for path in (TESTS.parent / "polar_gym").glob("*/__init__.py")}
    assert {path.parent.name for path in (TESTS / "unit").glob("*/__init__.py")} <= rooms | {"setup"}
