"""Reverses a git patch.

A data set of planted bugs holds the patch that plants a bug. The reverse patch is the reference solution.
`git apply -R` could undo the patch, but readers of a task expect a patch that applies without an option.
"""

from __future__ import annotations

import re

_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_HUNKS = re.compile(r"^(?=@@ )", re.MULTILINE)
_UNKNOWN = re.compile(r"^(GIT binary patch|Binary files |copy )", re.MULTILINE)
_OLD_AND_NEW = re.compile(r"^(old mode|rename from) (.*)\n(new mode|rename to) (.*)", re.MULTILINE)
_RENAME = re.compile(r"^rename from (.*)\nrename to (.*)", re.MULTILINE)
_SIDES = re.compile(r'^--- ("?)(?:a/)?(.*)\n\+\+\+ ("?)(?:b/)?(.*)', re.MULTILINE)
_BLOCK = re.compile(r"((?:^-.*\n(?:^\\.*\n)?)*)((?:^\+.*\n(?:^\\.*\n)?)*)", re.MULTILINE)
"""Matches removed lines and the added lines after them; `\\ No newline at end of file` belongs to the line above."""


def reversed_patch(patch: str) -> str:
    """Return the patch that undoes `patch`. Raises `ValueError` for a binary patch, a copy, and other text."""
    head, *sections = _SECTION.split(patch if patch.endswith("\n") else f"{patch}\n")
    if head.strip() or not sections:
        raise ValueError("is not a git patch: it does not begin with 'diff --git'")
    return "".join(map(_reversed_section, sections))


def _reversed_section(section: str) -> str:
    head, *hunks = _HUNKS.split(section)
    if _UNKNOWN.search(head):
        raise ValueError(f"{head.splitlines()[0]}: a binary change or a copy, which cannot be turned round")
    if rename := _RENAME.search(head):
        head = re.sub(".*", lambda _: f"diff --git {_sided('a', rename[2])} {_sided('b', rename[1])}", head, count=1)
    head = _OLD_AND_NEW.sub(r"\1 \4\n\3 \2", head)
    head = re.sub(
        r"^(?:(new)|deleted)(?= file mode )", lambda found: "deleted" if found[1] else "new", head, flags=re.M
    )
    head = re.sub(r"^index (\w+)\.\.(\w+)", r"index \2..\1", head, flags=re.M)
    return _SIDES.sub(_reversed_sides, head) + "".join(map(_reversed_hunk, hunks))


def _sided(side: str, name: str) -> str:
    """Return a name in the form of `diff --git`. git quotes unusual names together with the side."""
    return f'"{side}/{name[1:]}' if name.startswith('"') else f"{side}/{name}"


def _reversed_sides(found: re.Match[str]) -> str:
    old, new = (text if text == "/dev/null" else f"{side}/{text}" for side, text in (("b", found[2]), ("a", found[4])))
    return f"--- {found[3]}{new}\n+++ {found[1]}{old}"


def _reversed_hunk(hunk: str) -> str:
    """Return a hunk with its sides exchanged; removed lines come first again."""
    head, _, lines = hunk.partition("\n")
    lines = _BLOCK.sub(
        lambda found: re.sub(r"^\+", "-", found[2], flags=re.M) + re.sub("^-", "+", found[1], flags=re.M), lines
    )
    return re.sub(r"^@@ -(\S+) \+(\S+) @@", r"@@ -\2 +\1 @@", head) + "\n" + lines
