"""Per-token values of a trainer, laid over the tokens that they belong to.

The file is JSON lines or Parquet. Each record has `session_id`, `trace_id`, and any number of lists by name (`ratio`,
`entropy`, ...). A list begins at the first token of the trace's prompt. It may be shorter than the trace, because
trainers cut rows; null and NaN are for tokens without a value. `polar_gym.training.annotations` writes such files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.durable import json_lines
from polar_gym.errors import ConfigError, how_to_install
from polar_gym.schema import Episode

KEY = ("session_id", "trace_id")


class Annotations:
    """The values of all files, by session and trace. A later record of a trace adds names, and replaces equal ones."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Raises `ConfigError` naming the record and the field that is wrong."""
        self._values: dict[tuple[str, str], dict[str, NDArray[np.float32]]] = {}
        self.unused: set[tuple[str, str]] = set()
        """The keys that `of` was not asked for."""
        for file in files:
            for place, record in _records(file):
                key, values = _checked(place, record)
                self._values.setdefault(key, {}).update(values)
        self.unused.update(self._values)

    def of(self, episode: Episode, trace_id: str, length: int) -> dict[str, NDArray[np.float32]]:
        """Return the values of a trace, each as long as the trace. Raises `ConfigError` where one is longer."""
        key = (episode.session.session_id, trace_id)
        self.unused.discard(key)
        found = self._values.get(key, {})
        for name, array in found.items():
            if len(array) > length:
                raise ConfigError(
                    f"annotations of trace {trace_id}: {name} has {len(array)} values for {length} tokens"
                )
        return {
            name: np.concatenate([array, np.full(length - len(array), np.nan, np.float32)])
            for name, array in found.items()
        }


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the record of each line or row."""
    try:
        if file.suffix != ".parquet":
            with file.open("rb") as lines:
                yield from json_lines(lines, file)
            return
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError(f"pyarrow is missing; install it with: {how_to_install('export')}") from error
        try:
            rows = parquet.read_table(file).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{file}: not a Parquet file: {error}") from error
        for number, row in enumerate(rows, start=1):
            yield f"{file}:{number}", {name: value for name, value in row.items() if value is not None}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error


def _checked(place: str, record: dict[str, Any]) -> tuple[tuple[str, str], dict[str, NDArray[np.float32]]]:
    session_id, trace_id = (record.pop(name, None) for name in KEY)
    if not isinstance(session_id, str) or not isinstance(trace_id, str):
        raise ConfigError(f"{place}: expected {' and '.join(KEY)} as text")
    values: dict[str, NDArray[np.float32]] = {}
    for name, value in record.items():
        try:
            values[name] = np.asarray(value, np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{place}: {name}: expected a list of numbers: {error}") from error
        if values[name].ndim != 1:
            raise ConfigError(f"{place}: {name}: expected a flat list of numbers, one for each token of the trace")
    return (session_id, trace_id), values
