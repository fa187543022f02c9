"""Files that episodes are written to."""

from __future__ import annotations

import itertools
from pathlib import Path

DEVICES = Path("/dev")
"""`/dev/stdout` may be a link to a regular file, which then is nobody's to rename."""


def set_aside(output: Path) -> Path | None:
    """The new name of what an earlier run wrote; None: there is nothing. `outputs/demo.jsonl` becomes
    `outputs/demo.1.jsonl`, or the first number that is free."""
    file = output.resolve()  # a link stays, and is written through
    if DEVICES in output.absolute().parents or not file.is_file() or file.stat().st_size == 0:
        return None
    names = (file.with_name(f"{file.stem}.{number}{file.suffix}") for number in itertools.count(1))
    return file.rename(next(name for name in names if not name.exists()))
