"""Taking a git patch apart into the files that it changes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
"""Inside a section every line begins with a blank, a sign, a keyword or a letter of base 85 text, so this is exact."""

_NEW = re.compile(rb"\Adiff --git [^\n]*\nnew file mode ")
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_CONTROL = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a patch does to one file."""

    path: bytes
    """As it is on disk, without git's quoting."""
    new: bool
    """The file does not exist before the patch."""
    section: bytes
    """The part of the patch; joined, the parts are the patch again."""


def file_changes(diff: bytes) -> list[FileChange]:
    """The files that `diff` changes. The patch must have git's prefixes `a/` and `b/` and no renames; raises
    `ValueError` for any other."""
    head, *sections = _SECTION.split(diff)
    if head.strip():
        raise ValueError("the patch does not begin with 'diff --git'")
    return [FileChange(_path(section), bool(_NEW.match(section)), section) for section in sections]


def unquoted(name: bytes) -> bytes:
    """A file name as git prints it, without the quoting that it uses for unusual ones."""
    if len(name) < 2 or not (name.startswith(b'"') and name.endswith(b'"')):
        return name
    return _ESCAPE.sub(
        lambda match: bytes([int(match[1], 8)]) if len(match[1]) == 3 else _CONTROL.get(match[1], match[1]), name[1:-1]
    )


def _path(section: bytes) -> bytes:
    """The path in `diff --git a/PATH b/PATH`: the two halves say the same."""
    header = section.split(b"\n", 1)[0].removeprefix(b"diff --git ")
    middle = len(header) // 2
    old, new = unquoted(header[:middle]), unquoted(header[middle + 1 :])
    if not old.startswith(b"a/") or new != b"b/" + old[2:]:
        raise ValueError(f"cannot tell the path in {header.decode(errors='replace')!r}")
    return old[2:]
