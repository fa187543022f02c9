"""Makes wrong patches for a task out of its reference solution."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polar_gym.curation.equivalence import differing_lines
from polar_gym.curation.mutants import mutants
from polar_gym.curation.trial import Trial
from polar_gym.evaluators.patch import FileChange, file_changes

MUTANTS = 40
PARTS = 20
"""The number of partial patches that are tried at most."""

_HUNK = re.compile(rb"^(?=@@ )", re.MULTILINE)
_NO_CODE = (".md", ".rst", ".txt", "_version.py", "__about__.py")
"""Endings of files whose changes no test of behaviour is expected to notice."""
_DIRECTORY = Path(__file__).parent / "cheats"
_CHEATS = {
    "always equal": ("always_equal.py", "answer_tests.py"),
    "oracle": ("oracle.py", "answer_tests.py"),
    "emptied tests": ("emptied_tests.py",),
}
"""Name -> Python code that is put at the end of each source of the base commit that the solution changes."""


@dataclass(frozen=True, slots=True, eq=False)
class WrongPatch:
    name: str
    """The kind of the change and the change, in one line."""
    diff: bytes
    sources: Mapping[str, str] = field(default_factory=dict)
    """The Python files as the patch leaves them; empty for a patch that is no variant of the solution's code."""


async def wrong_patches(trial: Trial, sources: Mapping[str, str]) -> list[WrongPatch]:
    """Return mutants of the solution, partial solutions and cheats; always the same ones for a task.

    `sources` are the Python files that the solution changes, as the solution leaves them.
    """
    rng = random.Random(trial.task.instance_id)
    before = await trial.sources(b"", list(sources))
    code = {file: source for file, source in sources.items() if not file.endswith(_NO_CODE)}
    lines = {file: differing_lines(source, before.get(file, "")) for file, source in code.items()}
    found = [(file, mutant) for file, source in code.items() for mutant in mutants(source, lines[file])]
    chosen = sorted(rng.sample(range(len(found)), min(MUTANTS, len(found))))
    wrong: list[WrongPatch] = []
    for file, mutant in (found[number] for number in chosen):
        diff = await trial.diff(trial.gold, {file: mutant.source})
        wrong.append(WrongPatch(f"{file}:{mutant.line}: {mutant.change}", diff, {**sources, file: mutant.source}))
    parts = list(_parts(file_changes(trial.gold)))
    for number in sorted(rng.sample(range(len(parts)), min(PARTS, len(parts)))):
        file, part = parts[number]
        left = await trial.sources(part.diff, list(sources)) if file in sources else {}
        if await trial.applies(part.diff):
            wrong.append(replace(part, sources=left))
    for name, parts_of_it in _CHEATS.items() if before else ():
        code = "\n\n".join((_DIRECTORY / part).read_text() for part in parts_of_it)
        files = {file: f"{source}\n\n{code}" for file, source in before.items()}
        wrong.append(WrongPatch(f"cheat: {name}", await trial.diff(b"", files)))
    return wrong


def _parts(changes: list[FileChange]) -> Iterator[tuple[str, WrongPatch]]:
    """Yield each file and the patch without it, and likewise for each hunk of a file that has several."""
    for place, change in enumerate(changes):
        name = change.path.decode(errors="replace")
        if name.endswith(_NO_CODE):
            continue
        others = [each.section for each in changes]
        head, *hunks = _HUNK.split(change.section)
        for left_out in range(len(hunks)) if len(hunks) > 1 else ():
            others[place] = head + b"".join(hunks[:left_out] + hunks[left_out + 1 :])
            yield name, WrongPatch(f"without hunk {left_out + 1} of {name}", b"".join(others))
        if len(changes) > 1:
            others[place] = b""
            yield name, WrongPatch(f"without {name}", b"".join(others))
