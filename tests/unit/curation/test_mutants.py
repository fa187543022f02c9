"""Wrong variants of a source, and where two sources differ."""

from __future__ import annotations

import ast
from collections.abc import Collection

import pytest

from polar_gym.curation.equivalence import differing_functions, differing_lines
from polar_gym.curation.mutants import mutants

SOURCE = '''\
"""Doc 1."""
import os
__version__ = "1"
LIMIT: int = 3


def cut(text: str, at=2, *, keep=True):
    """Doc 2."""
    if not text or at >= LIMIT:
        raise ValueError(f"{at + 1} is more than 3")
    total = text[:at] + (
        text[at + 1 :]
    )
    print(at, total)
    return total if keep else None
'''
LINES = range(1, len(SOURCE.splitlines()) + 1)


def changes(source: str, lines: Collection[int] = LINES) -> set[str]:
    return {mutant.change for mutant in mutants(source, lines)}


def test_mutants_are_always_the_same_and_each_is_python_that_differs():
    made = mutants(SOURCE, LINES)
    assert made == mutants(SOURCE, LINES)
    forms = [ast.dump(ast.parse(mutant.source)) for mutant in made]
    assert len({*forms, ast.dump(ast.parse(SOURCE))}) == len(made) + 1


@pytest.mark.parametrize(
    "change",
    [
        "3 -> 4",
        "True -> False",
        "at >= LIMIT -> at > LIMIT",
        "not text -> text",
        "not text or at >= LIMIT -> not text and at >= LIMIT",
        "not text or at >= LIMIT -> at >= LIMIT",
        "text[:at] + ( text[at + 1 :] ) -> text[:at] - text[at + 1:]",
        "print(at, total) -> print(total, at)",
        "print(at, total) -> pass",
        "return total if keep else None -> return None",
        "keep -> not keep",
    ],
)
def test_a_mutant_changes_one_place(change):
    assert change in changes(SOURCE)


def test_types_texts_of_errors_and_name_tags_are_left_alone():
    assert changes(SOURCE, {1, 2, 3, 8}) == set()
    assert changes(SOURCE, {10}) == {'raise ValueError(f"{at + 1} is more than 3") -> pass'}
    assert not any(change.startswith(("int", "str")) for change in changes(SOURCE))
    assert changes("print('a b')\nprint('what a user reads')\n", {2}) == {"print('what a user reads') -> pass"}


def test_only_code_of_the_named_lines_is_changed():
    assert {mutant.line for mutant in mutants(SOURCE, {4, 14})} == {4, 14}


def test_lines_of_a_source_that_another_one_lacks():
    assert differing_lines("a\nb\nc  # new\n", "a\nx\nc\n") == {2}
    assert differing_lines("a\nc\n", "a\nb\nc\n") == set()
    assert differing_lines("a\nc\n", "a\nb\nc\n", beside=True) == {2}


def test_functions_that_differ():
    one = "import a\nclass K:\n    def f(self):\n        return 1\n\n"
    one += "def g():\n    def h():\n        return 2\n    return h()\n"
    right = {"m.py": one}
    assert differing_functions(right, {"m.py": one.replace("return 1", "return 3")}) == {"m.py::K.f": [4]}
    assert differing_functions(right, {"m.py": one.replace("return 2", "return 3")}) == {"m.py::g": [8]}
    assert differing_functions(right, {"m.py": one.replace("import a", "import b")}) is None
    assert differing_functions(right, {}) is None


def test_comments_docstrings_and_types_are_no_difference():
    other = (
        SOURCE.replace("import os", "import os\nPairs = Dict[str, int]")
        .replace("Doc 2", "Else")
        .replace(": str", "")
        .replace("LIMIT: int", "LIMIT")
        .replace('"1"', '"2"')
    )
    assert differing_functions({"m.py": SOURCE}, {"m.py": f"# more\n{other}"}) == {}
