"""Splits a git patch into the files that it changes."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

_SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
"""Exact: inside a section every line begins with a blank, a sign, a keyword or a letter of base 85 text."""

_OTHER_PATH = re.compile(rb"^(?:rename|copy) [^\n]*", re.MULTILINE)
"""A line that has git read or write another path than the first line of the section names. Git takes it also behind
`---` and `+++`; no line of a hunk or of base 85 text is like that."""

_CONTENT = (b"@@ ", b"GIT binary patch")
"""The beginning of the first line behind a section's header."""

_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
"""The escapes of git. Python knows more, which git takes as they stand."""

_NEW = re.compile(rb"\Adiff --git [^\n]*\nnew file mode ")
_NEW_LINK = re.compile(_NEW.pattern + rb"120000$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of a patch to one file."""

    path: bytes
    """The file's name on disk, without git's quoting."""
    new: bool
    """The file does not exist before the patch."""
    section: bytes
    """The part of the patch for this file; all parts joined are the patch again."""

    @property
    def new_link(self) -> bool:
        """Return whether the patch makes a symbolic link."""
        return bool(_NEW_LINK.match(self.section))


def file_changes(diff: bytes) -> list[FileChange]:
    """Return the files that `diff` changes.

    The patch must have git's prefixes `a/` and `b/`, no renames and no copies. Raises `ValueError` for any other patch.
    """
    head, *sections = _SECTION.split(diff)
    if head.strip():
        raise ValueError("the patch does not begin with 'diff --git'")
    return [FileChange(_path(section), bool(_NEW.match(section)), section) for section in sections]


def unquoted(name: bytes) -> bytes:
    """Return a file name that git printed, without the quoting that git uses for unusual names. Raises `ValueError` for
    an escape that git does not know."""
    if len(name) < 2 or not (name.startswith(b'"') and name.endswith(b'"')):
        return name
    if b"\\" in _ESCAPE.sub(b"", name):
        raise ValueError(f"{name.decode(errors='replace')}: git knows no such escape")
    return name[1:-1].decode("unicode_escape").encode("latin-1")  # git's escapes are a part of Python's


def _path(section: bytes) -> bytes:
    """Return the path in `diff --git a/PATH b/PATH`. Both halves must hold the same path, and no line another one: git
    takes the names behind `---` and `+++`, each by itself, where it finds none in the first line."""
    header = section.split(b"\n", 1)[0].removeprefix(b"diff --git ")
    middle = len(header) // 2
    old, new = unquoted(header[:middle]), unquoted(header[middle + 1 :])
    if not old.startswith(b"a/") or new != b"b/" + old[2:]:
        raise ValueError(f"cannot tell the path in {header.decode(errors='replace')!r}")
    if other := _OTHER_PATH.search(section):
        raise ValueError(f"{other[0].decode(errors='replace')!r}: the patch renames or copies a file")
    lines, new_file = io.BytesIO(section), bool(_NEW.match(section))
    next(lines)
    for place, line in enumerate(lines):
        if line.startswith(_CONTENT):
            break
        if _is_forged(line.rstrip(b"\n"), place, old[2:], new=new_file):
            said, of = (text.decode(errors="replace") for text in (line, header))
            raise ValueError(f"{said!r}: git writes no such line for {of!r}")
    return old[2:]


def _is_forged(line: bytes, place: int, path: bytes, *, new: bool) -> bool:
    """Return whether a line of a header makes a file, or names one, in another way than git's own patches do."""
    if line.startswith(b"new file mode "):
        return place != 0
    sign, name = line[:4], unquoted(line[4:].removesuffix(b"\t")) if line[:4] in (b"--- ", b"+++ ") else b""
    if sign == b"--- ":
        return name != b"a/" + path and not (new and name == b"/dev/null")
    return sign == b"+++ " and name not in (b"b/" + path, b"/dev/null")
