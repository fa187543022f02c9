"""Wrong variants of a source, and patches without a part of the solution."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Collection

import pytest

from polar_gym.curation.wrong import changed_lines, mutants, parts, section, wrong_patches
from polar_gym.evaluators.patch import file_changes
from tests.lifecycle.grading_bench import BUNDLED

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
    return {change.partition(": ")[2] for change in mutants(source, lines).values()}


def test_mutants_are_always_the_same_and_each_is_python_that_differs():
    made = list(mutants(SOURCE, LINES))
    assert made == list(mutants(SOURCE, LINES))
    forms = [ast.dump(ast.parse(mutant)) for mutant in made]
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
    assert changes("assert total, 'a total'") == set()


def test_only_code_of_the_named_lines_is_changed():
    assert {change.partition(":")[0] for change in mutants(SOURCE, {4, 14}).values()} == {"4", "14"}


def test_lines_of_a_source_that_another_one_lacks():
    assert changed_lines("a\nb\nc  # new\n", "a\nx\nc\n") == {2}
    assert changed_lines("a\nc\n", "a\nb\nc\n") == set()
    assert changed_lines("\f\na\u2028\nb\n", "\f\na\u2028\n") == {3}, "the lines of `ast`"


def test_a_source_of_another_python_has_no_mutants():
    assert mutants("print 1\n", {1}) == {}


BEFORE = SOURCE + "".join(f"\n\ndef call_{number}():\n    return {number}\n" for number in range(6))
"""Has room for several hunks."""
UNNOTICED = {
    "comment": ("LIMIT: int = 3", "LIMIT: int = 3  # or more"),
    "blank line": ("def call_5", "\ndef call_5"),
    "docstring": ("Doc 2.", "Cuts a text."),
    "annotation": ("text: str", "text: object"),
    "version": ('__version__ = "1"', '__version__ = "2"'),
    "quotes": ('"""Doc 2."""', "'Doc 2.'"),
}


def part_names(file: str, before: str, right: str) -> list[str]:
    return [name for _, name, _ in parts(file, before, right)]


def test_a_part_leaves_out_one_hunk_or_one_file_with_code():
    right = BEFORE.replace("LIMIT: int = 3", "LIMIT: int = 4").replace("return 5", "return 6")
    assert list(parts("m.py", BEFORE, right)) == [
        ("m.py", "without m.py", BEFORE),
        ("m.py", "without hunk 1 of m.py", BEFORE.replace("return 5", "return 6")),
        ("m.py", "without hunk 2 of m.py", BEFORE.replace("LIMIT: int = 3", "LIMIT: int = 4")),
    ]
    assert part_names("m.js", "// old\n", "// new\n") == ["without m.js"]


@pytest.mark.parametrize("change", UNNOTICED)
def test_a_part_lacks_more_than_what_no_test_notices(change):
    """Guards against "wrong" patches that behave as the solution does, as a release without its version number."""
    unnoticed = BEFORE.replace(*UNNOTICED[change])
    assert unnoticed != BEFORE
    assert part_names("m.py", BEFORE, unnoticed) == []
    changed = unnoticed.replace("return 2", "return 3")
    assert len(part_names("m.py", BEFORE, changed)) == 2


def test_a_patch_without_its_only_file_is_not_tried():
    task = BUNDLED["intervals"]
    (file,) = [each.path.decode() for each in file_changes(task.patch.encode())]
    made = wrong_patches(task, {file: BEFORE}, {file: BEFORE.replace("return 2", "return 3")})
    assert made
    assert all(each.diff for each in made)
    assert f"without {file}" not in [each.name for each in made]


@pytest.mark.parametrize("before", [None, "", "x = 1\n", "x = 1\r\ny = 2", "x = '\x0c\u2028'\nz\n"])
@pytest.mark.parametrize("after", ["y = 3\r\n", "y = 3", "x = 1\n# \x0c\n"])
def test_git_applies_the_section_of_a_file(tmp_path, before, after):
    if before is not None:
        (tmp_path / "m.py").write_bytes(before.encode())
    git = ["git", "apply", "--whitespace=nowarn"]
    subprocess.run(git, cwd=tmp_path, input=section("m.py", before, after), check=True)
    assert (tmp_path / "m.py").read_bytes() == after.encode()
