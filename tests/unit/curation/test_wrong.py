"""Wrong variants of a source, and patches without a part of the solution."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Collection

import pytest

from polar_gym.curation.wrong import changed_lines, mutants, parts, section

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
    return {change for _, change, _ in mutants(source, lines)}


def test_mutants_are_always_the_same_and_each_is_python_that_differs():
    made = mutants(SOURCE, LINES)
    assert made == mutants(SOURCE, LINES)
    forms = [ast.dump(ast.parse(mutant)) for _, _, mutant in made]
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


def test_only_code_of_the_named_lines_is_changed():
    assert {line for line, _, _ in mutants(SOURCE, {4, 14})} == {4, 14}


def test_lines_of_a_source_that_another_one_lacks():
    assert changed_lines("a\nb\nc  # new\n", "a\nx\nc\n") == {2}
    assert changed_lines("a\nc\n", "a\nb\nc\n") == set()


def test_a_source_of_another_python_has_no_mutants():
    assert mutants("print 1\n", {1}) == []


def test_a_part_leaves_out_one_hunk_or_one_file_with_code():
    hunks = [
        "@@ -1 +1 @@\n-a = 1\n+a = 2\n",
        "@@ -9 +9 @@\n-b  # c\n+b  # d\n",
        "@@ -20 +20,2 @@\n x\n+\n+    # more\n",
    ]
    one = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n"
    other = "diff --git a/n.md b/n.md\n--- a/n.md\n+++ b/n.md\n@@ -1 +1 @@\n-a\n+b\n"
    made = {part.name: part.diff.decode() for part in parts((one + "".join(hunks) + other).encode())}
    assert made == {
        "without hunk 1 of m.py": one + hunks[1] + hunks[2] + other,
        "without hunk 2 of m.py": one + hunks[0] + hunks[2] + other,
        "without m.py": other,
    }


@pytest.mark.parametrize("before", [None, "", "x = 1\n", "x = 1\r\ny = 2", "x = '\x0c\u2028'\nz\n"])
@pytest.mark.parametrize("after", ["y = 3\r\n", "y = 3", "x = 1\n# \x0c\n"])
def test_git_applies_the_section_of_a_file(tmp_path, before, after):
    if before is not None:
        (tmp_path / "m.py").write_bytes(before.encode())
    git = ["git", "apply", "--whitespace=nowarn"]
    subprocess.run(git, cwd=tmp_path, input=section("m.py", before, after), check=True)
    assert (tmp_path / "m.py").read_bytes() == after.encode()
