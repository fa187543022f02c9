"""Reverses a git patch.

A data set of planted bugs holds the patch that plants a bug. The reverse patch is the reference solution.
`git apply -R` could undo the patch, but readers of a task expect a patch that applies without an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\S+) \+(\S+) @@(.*)", re.DOTALL)
_SIDE = re.compile(r'(?<=^)[ab](?=/)|(?<=^")[ab](?=/)')
"""Matches the side (`a` or `b`) in a file's name, which may be quoted."""
_KEYS = ("diff --git", "rename from", "rename to", "old mode", "new mode", "new file mode", "deleted file mode")
_KEYS += ("index", "---", "+++")
_OPPOSITE = {"new file mode": "deleted file mode", "deleted file mode": "new file mode"}
_SWAPPED = {"old mode": "new mode", "new mode": "old mode", "rename from": "rename to", "rename to": "rename from"}


def reversed_patch(patch: str) -> str:
    """Return the patch that undoes `patch`. Raises `ValueError` for a binary patch, a copy, and other text."""
    head, *sections = _SECTION.split(patch)
    if head.strip() or not sections:
        raise ValueError("is not a git patch: it does not begin with 'diff --git'")
    return "".join(map(_reversed_section, sections))


def _reversed_section(section: str) -> str:
    lines = section.removesuffix("\n").split("\n")
    start = next((number for number, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    reversed_lines = [*_reversed_head(lines[:start]), *_reversed_hunks(lines[start:])]
    return "".join(f"{line}\n" for line in reversed_lines)


def _reversed_head(lines: list[str]) -> Iterator[str]:
    said = {key: line.removeprefix(f"{key} ") for line in lines for key in _KEYS if line.startswith(f"{key} ")}
    if any(line.startswith(("GIT binary patch", "Binary files ", "copy ")) for line in lines):
        raise ValueError(f"{lines[0]}: a binary change or a copy, which cannot be turned round")
    for line in lines:
        key = next((key for key in _KEYS if line.startswith(f"{key} ")), "")
        if key == "diff --git" and "rename from" in said:
            yield f"diff --git {_sided('a', said['rename to'])} {_sided('b', said['rename from'])}"
        elif key in _SWAPPED:
            yield f"{key} {said[_SWAPPED[key]]}"
        elif key in _OPPOSITE:
            yield f"{_OPPOSITE[key]} {said[key]}"
        elif key == "index":
            yield re.sub(r"^index (\w+)\.\.(\w+)", r"index \2..\1", line)
        elif key in ("---", "+++"):
            other, side = (said["+++"], "a") if key == "---" else (said["---"], "b")
            yield f"{key} {_SIDE.sub(side, other)}"
        else:
            yield line


def _sided(side: str, name: str) -> str:
    """Return a name in the form of `diff --git`. git quotes unusual names together with the side."""
    return f'"{side}/{name[1:]}' if name.startswith('"') else f"{side}/{name}"


def _reversed_hunks(lines: list[str]) -> Iterator[str]:
    """Yield reversed hunks: added lines come first, as removed lines.

    `\\ No newline at end of file` stays behind its line.
    """
    removed: list[str] = []
    added: list[str] = []
    current: list[str] = []
    for line in lines:
        if line.startswith("-"):
            current = added
            current.append(f"+{line[1:]}")
        elif line.startswith("+"):
            current = removed
            current.append(f"-{line[1:]}")
        elif line.startswith("\\") and current:
            current.append(line)
        else:
            yield from (*removed, *added)
            removed, added, current = [], [], []
            hunk = _HUNK.fullmatch(line)
            yield f"@@ -{hunk[2]} +{hunk[1]} @@{hunk[3]}" if hunk else line
    yield from (*removed, *added)
