"""Writes the instruction of a task that was made from two releases; `statement` writes that of a commit.

The maintainers' words are best: the entries that only the new release's changelog has, without headings, dates, credits
and links. Without a changelog, the names of the failing tests state the expected behaviour, as phrases, with the errors
that the tests end with. The instruction also lists the functions that the hidden tests call and that the old release
lacks or has with other arguments. It gives their signatures, because a harness could not guess them. Bodies, test code
and expected values are never shown.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Literal

from polar_gym.curation.releases import is_test

_CHANGELOG = re.compile(
    r"(change(s|log)?|history|news|release[-_]?notes|whatsnew|versions)(\.(rst|md|txt))?", re.IGNORECASE
)
_ADDED_LINES = 120
"""The most lines by which a changelog grows. One that grew by more was rewritten, not continued."""
_HEADING = re.compile(
    r"\W*((version|release|v)?\W*\d+\.\d+[\w.]*\b.*|[=~^*+_#\"'-]{3,}|(release|released|date)\b.{0,40}\d{4}.*)",
    re.IGNORECASE,
)
NOISE = (
    (re.compile(r"\[([^\]\n]+)\]\([^)\n]*\)"), r"\1"),  # Markdown links keep their text
    (re.compile(r"`([^`<\n]+?)\s*<[^>\n]*>`__?"), r"\1"),  # links of reStructuredText keep their text too
    (re.compile(r":(?:issue|pr|pull|user|gh|bug):`[^`\n]*`"), ""),
    (re.compile(r"https?://\S+"), ""),
    (re.compile(r"\[([#@][\w-]+)\]"), r"\1"),
    (re.compile(r"\s*\((?:thanks to |(?:issue|pr|gh)[ -]?#?\d)[^()\n]*\)", re.IGNORECASE), ""),
    (re.compile(r"\s*[(\[]\s*(?:[^()\n]{0,60}?[\s,;])?(?:by\s+)?[#@][\w-]+[^()\n]{0,60}[)\]]"), ""),
    (re.compile(r",?\s*\b(?:patch |pr )?by [\w .-]{2,40}(?=\))", re.IGNORECASE), ""),
    (re.compile(r"(?:\bin |\bby |\bthanks to )?(?<!\w)[#@][\w-]+", re.IGNORECASE), ""),
    (re.compile(r"(?<=\s)[(\[]\s*[,;]?\s*[)\]]"), ""),  # brackets that the other patterns emptied, not the () of a call
)
_DOCUMENTATION_ONLY = re.compile(
    r"^\W*(?:add(?:ed)? |remove[d]? |drop(?:ped)? |update[d]? |test(?:ed|s)? (?:on|with|against) )?"
    r"(?:official )?(?:support for )?(?:docs?\b|documentation|ci\b|python ?3\.\d+|pypy)",
    re.IGNORECASE,
)


def write_issue(
    package: str, old: Path, new: Path, *, failing: Mapping[str, str], test_patch: str
) -> tuple[str, Literal["changelog", "test names"]]:
    """Return the problem statement and the name of its source.

    `failing`: id of each test of FAIL_TO_PASS -> the error that the test ends with today, or "".
    """
    entries = changelog_entries(old, new)
    if entries:
        title = f"{package}: {shorten(_plain(_first(entries)), 90, placeholder=' …')}"
        body = "The next release of this library is to bring the changes below, which are not in its sources yet.\n\n"
        body += "\n".join(entries)
    else:
        title = f"{package}: {shorten(phrase(next(iter(failing))), 90, placeholder=' …')}"
        body = behaviours(failing)
    return f"{title}\n\n{body}{callers(old, new, test_patch)}\n", "changelog" if entries else "test names"


def behaviours(failing: Mapping[str, str]) -> str:
    """Return the names of failing tests as phrases, each with the error that the test ends with."""
    phrases = dict[str, str]()
    for test, error in failing.items():
        phrases[phrase(test)] = phrases.get(phrase(test)) or error
    lines = (f"- {text}" + (f": today `{error}`" if error else "") for text, error in phrases.items())
    return "These behaviours do not work as they should:\n\n" + "\n".join(lines)


def callers(old: Path, new: Path, test_patch: str) -> str:
    """Return the paragraph that names what the hidden tests call and the old sources lack; "" where that is nothing."""
    names = interface(old, new, test_patch)
    head = "\n\nCallers will use these, which are new or take other arguments than today:\n\n"
    return head + "\n".join(f"- `{name}`" for name in names) if names else ""


def changelog_entries(old: Path, new: Path) -> list[str]:
    """Return the lines, cleaned, that the new release's changelog has and the old release's has not."""
    for path in sorted(new.iterdir()) + sorted((new / "docs").glob("*")):
        if not path.is_file() or not _CHANGELOG.fullmatch(path.name):
            continue
        before = old / path.relative_to(new)
        old_lines = before.read_text(errors="replace").splitlines() if before.is_file() else []
        added = _added(old_lines, path.read_text(errors="replace").splitlines())
        if before.is_file() and len(added) <= _ADDED_LINES:
            return _cleaned(added)
    return []


def _added(old: list[str], new: list[str]) -> list[str]:
    changes = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return [line for tag, _, _, start, end in changes if tag != "equal" for line in new[start:end]]


def _cleaned(lines: Iterable[str]) -> list[str]:
    kept: list[str] = []
    skipping = False
    for line in lines:
        if line[:1] not in ("", " ", "\t"):  # a new entry, not the rest of the one before
            skipping = bool(_DOCUMENTATION_ONLY.match(line))
        if skipping or _HEADING.fullmatch(line.strip()):
            continue
        for pattern, replacement in NOISE:
            line = pattern.sub(replacement, line)
        line = line.rstrip()
        if (line or (kept and kept[-1])) and (re.search(r"\w", line) or not line):
            kept.append(line)
    return _without_empty_sections(kept)


def _without_empty_sections(lines: list[str]) -> list[str]:
    """Drop section titles (`### Added`, `Bug Fixes`) that no entry follows. Drop all lines if none is an entry."""
    kept = [
        line
        for number, line in enumerate(lines)
        if not line or _is_entry(line) or next((_is_entry(later) for later in lines[number + 1 :] if later), False)
    ]
    return "\n".join(kept).strip("\n").split("\n") if any(map(_is_entry, kept)) else []


def _is_entry(line: str) -> bool:
    return bool(re.match(r"\s*[*+-] |\s+\S", line)) or len(line.split()) > 3


def _first(lines: Sequence[str]) -> str:
    """Return the first entry that is not the heading of a nested list."""
    entries = [line for line in lines if _is_entry(line)]
    for line, following in zip(entries, [*entries[1:], ""], strict=True):
        nested = re.match(r"(\s*)[*+-] ", following)
        if not nested or len(nested[1]) <= len(line) - len(line.lstrip()):
            return line
    return entries[0]


def _plain(line: str) -> str:
    return line.strip().lstrip("*+-# ").rstrip(".:").replace("`", "")


def phrase(test_id: str) -> str:
    """Return the subject of a test without its code: `tests/test_a.py::TestB::test_c_of_d[e]` -> `c of d (a, B)`."""
    path, _, rest = test_id.partition("::")
    *classes, function = rest.partition("[")[0].split("::")
    words = re.sub(r"^test(_+|$)", "", function).replace("_", " ").strip() or "basic behaviour"
    module = re.sub(r"^test_|_tests?$", "", PurePosixPath(path).stem)
    about = [module, *(re.sub(r"^Tests?|Tests?$", "", name) for name in classes)]
    return f"{words} ({', '.join(part for part in about if part)})"


def interface(old: Path, new: Path, test_patch: str) -> list[str]:
    """Return the functions, classes and methods that the added tests mention and that are new or take other arguments:
    private ones, too, because tests that import them fail without."""
    added = "\n".join(line[1:] for line in test_patch.splitlines() if line.startswith("+") and line[:3] != "+++")
    mentioned = {name for name in re.findall(r"[A-Za-z_]\w*", added) if not name.startswith("__")}
    changed = set(_definitions(new)) - set(_definitions(old))
    return sorted(each for each in changed if each.partition("(")[0].rpartition(".")[2] in mentioned)


def _definitions(tree: Path) -> Iterator[str]:
    """Yield `module.function(arguments)`, `module.Class`, `module.Class.method(arguments)` of all source files."""
    for path in tree.rglob("*.py"):
        relative = path.relative_to(tree)
        if is_test(relative.as_posix()) or relative.name == "setup.py":
            continue
        try:
            module = ast.parse(path.read_text(errors="replace"))
        except SyntaxError:
            continue  # a template or a file of another Python version
        parts = [part for part in relative.with_suffix("").parts if part not in ("src", "lib", "__init__")]
        yield from _signatures(module.body, ".".join(parts))


def _signatures(body: Iterable[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}.{node.name}"
            yield from _signatures(node.body, f"{prefix}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{node.name}({ast.unparse(node.args)})"
