"""What a trainer writes about its rows is what a page shows of their traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polar_gym.training import make_batch, padded
from polar_gym.training.annotations import write_annotations
from polar_gym.view.annotations import Annotations
from tests.support.made_runs import made_session


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_values_of_padded_rows_come_back_by_trace(form: str, tmp_path: Path) -> None:
    episodes = [made_session(0, sample, None) for sample in range(2)]
    rows = make_batch(episodes, multiple_of=8, allow_scripted=True).rows
    logprobs = padded(rows, 0)["old_logprobs"] - 1
    file = tmp_path / "notes.jsonl"
    with file.open("ab") as notes:
        write_annotations(notes, rows, {"trainer": logprobs})
    if form == "parquet":
        json, parquet = pytest.importorskip("pyarrow.json"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(json.read_json(file), file := tmp_path / "notes.parquet")
    read = Annotations([file])
    sessions = {episode.session.session_id: episode for episode in episodes}
    for row in rows:
        if not row.inert:
            values = read.of(sessions[row.session_id], row.trace_id, len(row.token_ids) + 7)["trainer"]
            assert np.allclose(values[:-7], row.logprobs - 1)
            assert np.isnan(values[-7:]).all(), "a trainer may have cut the row"
    assert read.unused == set()


def test_an_array_that_is_too_short_is_refused(tmp_path: Path) -> None:
    rows = make_batch([made_session(0, 0, None)], allow_scripted=True).rows
    with (tmp_path / "notes.jsonl").open("wb") as notes, pytest.raises(ValueError, match="ratio: expected 1 arrays"):
        write_annotations(notes, rows, {"ratio": [np.ones(3)]})
