"""A dataset directory that grows in parts.

    README.md                             the card; `datasets.load_dataset(DIR)` reads the splits from it
    filters.json                          the filters of this directory; locked during an export
    parquet/SPLIT-00000.parquet           rows, one file for each part and split
    jsonl/SPLIT-00000.jsonl               the same rows
    ledger/00000.jsonl                    the episodes of that part: a part without a ledger does not count

Every file is written beside its place and renamed, the ledger last. A run that was killed leaves whole files only. The
next run removes the files that have no ledger, and takes their episodes as new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import orjson
import pyarrow.parquet as pq

from polar_gym import durable
from polar_gym.errors import ConfigError
from polar_gym.export.acceptance import Filters
from polar_gym.export.ledger import EpisodeEntry
from polar_gym.export.rows import SCHEMA, Row, to_json_line, write_parquet

SPLITS = ("train", "validation")
VALIDATION_SHARE = 0.1

_CARD = """\
---
configs:
- config_name: default
  data_files:
{files}
---
Agent trajectories that solved their tasks, as {count} examples. `input_ids` are the exact ids that the engine \
conditioned on and sampled, `assistant_masks` is 1 where the policy sampled; `messages` and `tools` say the same as \
chat, and `trained` names the messages that are trained here. All examples of a task are in one split; of each \
repository about one task in ten is in `validation`.
"""


def split_of(task: str) -> str:
    """Return the split of all examples of a task. About one task in ten of each repository is for validation.

    The task's name alone decides. The order of the episodes, later additions and other directories do not move a task
    to the other split. Datasets can therefore be joined: a model that was trained on one dataset has not seen the
    validation tasks of another. The price is that the share of a repository with few tasks is a matter of chance.

    Repositories are in both splits, because they are too few to split as groups (all eleven of SWE-Gym would be in
    train). To hold out a repository, filter by the column `repo`.
    """
    share = int.from_bytes(hashlib.sha256(task.encode()).digest()[:8]) / 2**64
    return "validation" if share < VALIDATION_SHARE else "train"


class SftDataset:
    """A directory that is open for more parts. `open_dataset` excludes other processes meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries = [entry for path in self._ledgers() for entry in _read_ledger(path)]
        self.seen = {(entry.session_id, entry.attempt) for entry in self.entries}
        self.digests = {example.digest for entry in self.entries for example in entry.examples}
        self.splits = {entry.task_id: example.split for entry in self.entries for example in entry.examples}
        """Task id -> its split. A task stays in the split that it has, also if an earlier version chose that split."""
        self._parts = len(self._ledgers())
        self._remove_unfinished()
        self._check_columns()
        if self.entries:  # a process that was killed may have committed a part without it
            self._write_card()

    def add_part(self, entries: Sequence[EpisodeEntry], rows: Sequence[tuple[str, Row]]) -> None:
        """Commit episodes with their rows (split, row): all of them, or none if the process is killed."""
        part = f"{self._parts:05d}"
        for split in SPLITS:
            chosen = [row for name, row in rows if name == split]
            if chosen:
                with durable.replacing(self.directory / "parquet" / f"{split}-{part}.parquet") as file:
                    write_parquet(chosen, file)
                with durable.replacing(self.directory / "jsonl" / f"{split}-{part}.jsonl") as file:
                    file.writelines(map(to_json_line, chosen))
        with durable.replacing(self.directory / "ledger" / f"{part}.jsonl") as file:
            file.writelines(entry.to_json() + b"\n" for entry in entries)
        self._parts += 1
        self.entries += entries
        self._write_card()

    def _write_card(self) -> None:
        present = [split for split in SPLITS if list((self.directory / "parquet").glob(f"{split}-*.parquet"))]
        files = "\n".join(f"  - split: {split}\n    path: parquet/{split}-*.parquet" for split in present)
        count = sum(len(entry.examples) for entry in self.entries)
        durable.write(self.directory / "README.md", _CARD.format(files=files or "    []", count=count).encode())

    def _ledgers(self) -> list[Path]:
        return sorted((self.directory / "ledger").glob("*.jsonl"))

    def _remove_unfinished(self) -> None:
        committed = {path.stem for path in self._ledgers()}
        for path in [*self.directory.glob("parquet/*"), *self.directory.glob("jsonl/*")]:
            if path.stem.rpartition("-")[2] not in committed:
                path.unlink()
        durable.remove_partial(self.directory)

    def _check_columns(self) -> None:
        """Raise `ConfigError` where the parts have other columns: readers take no dataset with both."""
        for part in sorted(self.directory.glob("parquet/*"))[:1]:
            if pq.read_schema(part) != SCHEMA:
                raise ConfigError(
                    f"--out={self.directory}: an earlier version wrote other columns; export to a new directory"
                )


@contextlib.contextmanager
def open_dataset(directory: Path, filters: Filters) -> Iterator[SftDataset]:
    """Open the dataset in `directory`, or make a new one there.

    Raises `ConfigError` where the directory holds something else, has other filters or columns, or is written to.
    """
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / "filters.json").exists():
            raise ConfigError(f"--out={directory}: holds something else than a dataset of this command; name a new one")
        for name in ("parquet", "jsonl", "ledger"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        with durable.locked(directory / "filters.json", wait=False) as file:
            _check_filters(file, directory, filters)
            yield SftDataset(directory)
    except BlockingIOError as error:
        raise ConfigError(f"--out={directory}: another export is writing there; wait for it") from error
    except OSError as error:
        raise ConfigError(f"--out={directory}: {error.strerror}: {error.filename}") from error


def _check_filters(file: IO[bytes], directory: Path, filters: Filters) -> None:
    """Write the filters into a new directory. Raises `ConfigError` where the directory has others, or damaged ones."""
    file.seek(0)
    known = [each for _, each in durable.json_lines(file, directory / "filters.json")]
    if orjson.loads(filters.to_json()) in known:
        return
    if any((directory / "parquet").iterdir()):
        made = "its filters.json is empty; restore that file"
        if known:
            made = f"was made with the filters {json.dumps(known[0])}; give the same"
        raise ConfigError(f"--out={directory}: {made}, or another directory")
    for entries in (directory / "ledger").iterdir():  # no episode was accepted: the new filters see all again
        entries.unlink()
    file.truncate(0)
    file.write(filters.to_json())
    file.flush()
    os.fsync(file.fileno())  # the parts are on the disk, and mean nothing without their filters


def _read_ledger(path: Path) -> list[EpisodeEntry]:
    try:
        with path.open("rb") as lines:
            return list(durable.records(lines, path, EpisodeEntry, "an entry of a ledger of this version"))
    except ConfigError as error:
        raise ConfigError(f"{error}; export to a new directory") from error
