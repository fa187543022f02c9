"""Files that episodes are written to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_gym.durable import json_lines

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


def remove_torn_line(output: Path) -> set[tuple[str, int]]:
    """Cut off a last line that a killed process left unfinished, and return the task and sample index of each episode
    in the file. A file that is missing has none. Raises `ConfigError` for a line that is not JSON."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done = {
        (line["session"]["task_id"], line["session"]["sample_index"])
        for _, line in json_lines(whole.splitlines(), output)
        if not _begins_again(line)
    }
    if len(whole) < len(data):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return done


def _begins_again(line: Mapping[str, Any]) -> bool:
    """Return whether the line is of a session that could not go on with its own record: another one follows it."""
    return (line["session"]["failure"] or {}).get("kind") == "diverged" and bool(
        ((line["request"]).get("start_from") or {}).get("owned")
    )
