"""The file that new tasks are added to."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.curation.making import append_line, instance_ids


@pytest.mark.parametrize("before", ["", '{"instance_id": "a"}\n', '{"instance_id": "a"}'])
def test_a_line_is_added_to_a_file_whose_last_line_has_no_end(tmp_path: Path, before: str) -> None:
    """Guards against two rows on one line, which no reader takes, after a file was edited by hand."""
    file = tmp_path / "tasks.jsonl"
    file.write_text(before)
    append_line(file, {"instance_id": "b"})
    append_line(file, {"instance_id": "c"})
    assert instance_ids(file) == {"b", "c"} | ({"a"} if before else set())
