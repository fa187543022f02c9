"""Tasks from a Hugging Face data set in SWE-bench's field names: from the hub, its mirror, or a local directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polar_gym.errors import how_to_install
from polar_gym.tasks import Task
from polar_gym.tasks.rows import FileSelection, PlacedRow, select


class HuggingFaceOptions(FileSelection):
    dataset: str
    """The data set's name on the hub, or a directory."""
    split: str = "test"
    """The name of the data set's part."""
    revision: str | None = None
    """A commit or tag of the data set; null: the newest. Name one in a run that must be repeatable."""


class HuggingFaceTasks:
    Options = HuggingFaceOptions

    def __init__(self, options: HuggingFaceOptions) -> None:
        self._options = options

    def load(self) -> list[Task]:
        dataset = Path(self._options.dataset)
        return select(self._options.dataset, self._rows(), dataset if dataset.is_dir() else None, self._options)

    def _rows(self) -> Iterator[PlacedRow]:
        name, split = self._options.dataset, self._options.split
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ImportError as error:
            raise ValueError(
                f"tasks=huggingface needs `datasets`; install it with: {how_to_install('export')}; "
                "or download the data set's Parquet file and set tasks=parquet"
            ) from error
        try:
            loaded = datasets.load_dataset(name, split=split, revision=self._options.revision)
        except (OSError, ValueError, DatasetsError) as error:  # no hub, no such data set, or bad
            raise ValueError(
                f"tasks.dataset={name!r}, split {split!r}: {error}; without a hub, download the data set's Parquet "
                "file elsewhere and set tasks=parquet"
            ) from error
        for number, row in enumerate(loaded, start=1):
            yield f"{name}[{split}]:{number}", dict(row)


TASKS = HuggingFaceTasks
