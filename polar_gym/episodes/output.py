"""Files that episodes are written to."""

from __future__ import annotations

import itertools
from pathlib import Path

from pydantic import ConfigDict

from polar_gym.durable import records
from polar_gym.record import Record
from polar_gym.schema import Session, TaskRequest

DEVICES = Path("/dev")
"""`/dev/stdout` may be a link to a regular file that belongs to the caller's shell: never rename that file."""


class _Line(Record):
    """The parts of an episode that tell which sample it is of. The others, which may be long, are not checked."""

    model_config = ConfigDict(extra="ignore")

    session: Session
    request: TaskRequest


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
    in the file. A file that is missing has none. Raises `ConfigError` for a line that is no episode."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done = {
        (line.session.task_id, line.session.sample_index)
        for line in records(whole.splitlines(), output, _Line, "an episode of this version")
        if not _begins_again(line)
    }
    if len(whole) < len(data):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return done


def _begins_again(line: _Line) -> bool:
    """Return whether the line is of a session that could not go on with its own record: another one follows it."""
    diverged = line.session.failure is not None and line.session.failure.kind == "diverged"
    return diverged and line.request.start_from is not None and line.request.start_from.owned
