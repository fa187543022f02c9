"""The start model is made of demonstrations: of those that failed, a few are told of, and many stop the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.errors import ConfigError
from polar_gym.learning.files import write_episodes
from polar_gym.learning.start import demonstrated
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def _played(directory: Path, failed: int) -> None:
    """Write 20 demonstrations, the first `failed` of which failed."""
    pytest.importorskip("pyarrow", reason="needs the extra `export`")
    episodes = [
        make_episode(f"s{number}", None if number < failed else 0.0, [make_call(0, [number], [7, 8])])
        for number in range(20)
    ]
    write_episodes(directory / "demonstrations.jsonl", episodes)


@pytest.mark.parametrize("failed", [0, 2])
def test_demonstrations_that_failed_are_told(tmp_path: Path, failed: int) -> None:
    """Guards against a start model of fewer rows, of which no line says why it is another one."""
    _played(tmp_path, failed)
    told: list[str] = []
    assert len(demonstrated(tmp_path, told.append)) == 20 - failed
    assert [line.split("demonstrations.jsonl: ")[1] for line in told] == (
        ["2 of 20 demonstrations failed (2 x engine_error, e.g. 'gone'); the start model does without them"]
        * bool(failed)
    )


def test_many_demonstrations_that_failed_stop_the_run(tmp_path: Path) -> None:
    _played(tmp_path, failed=3)
    with pytest.raises(ConfigError, match=r"3 of 20 .* \(3 x engine_error, e\.g\. 'gone'\); mend"):
        demonstrated(tmp_path, lambda line: None)
