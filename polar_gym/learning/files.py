"""Reads and writes the files of a run that hold a JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polar_gym.durable import json_lines, write
from polar_gym.schema import Episode


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file. Raises `ConfigError`."""
    return [row for _, row in json_lines(path.read_bytes().splitlines(), path)]


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add an object to a file, and put it on the disk."""
    with path.open("ab") as file:
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    path.parent.mkdir(exist_ok=True)
    write(path, b"".join(episode.to_json() + b"\n" for episode in episodes))
