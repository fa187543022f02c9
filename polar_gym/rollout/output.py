"""Files that episodes are written to."""

from __future__ import annotations

import itertools
from pathlib import Path


def set_aside(output: Path) -> Path | None:
    """The new name of what an earlier run wrote; None: there is nothing. `outputs/demo.jsonl` becomes
    `outputs/demo.1.jsonl`, or the first number that is free."""
    if not output.is_file() or output.stat().st_size == 0:
        return None
    names = (output.with_name(f"{output.stem}.{number}{output.suffix}") for number in itertools.count(1))
    return output.rename(next(name for name in names if not name.exists()))
