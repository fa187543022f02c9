"""Files that episodes are written to."""

from __future__ import annotations

import itertools
from pathlib import Path

from polar_gym.durable import cut_torn_line, records
from polar_gym.schema import Episode

DEVICES = Path("/dev")
"""`/dev/stdout` may be a link to a regular file that belongs to the caller's shell: never rename that file."""


def set_aside(output: Path) -> Path | None:
    """Rename the file of an earlier run, and return the new name. None: the file is missing or empty.

    `outputs/demo.jsonl` becomes `outputs/demo.1.jsonl`, or takes the first number that is free.
    """
    file = output.resolve()  # a link stays, and leads to the new file
    if DEVICES in output.absolute().parents or not file.is_file() or file.stat().st_size == 0:
        return None
    names = (file.with_name(f"{file.stem}.{number}{file.suffix}") for number in itertools.count(1))
    return file.rename(next(name for name in names if not name.exists()))


def remove_torn_line(output: Path) -> list[Episode]:
    """Cut off a last line that a killed process left unfinished, and return the episodes in the file. A file that is
    missing has none. Raises `ConfigError` for a line that is no episode."""
    if not output.exists():
        return []
    with output.open("rb") as lines:
        episodes = list(records(lines, output, Episode, "an episode of this version", may_be_cut=True))
    cut_torn_line(output)
    return episodes
