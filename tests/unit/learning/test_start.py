"""The start model is made of demonstrations: of those that failed, a few are told of, and many stop the run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from unittest import mock

import pytest

from polar_gym.errors import ConfigError
from polar_gym.learning import start
from polar_gym.learning.families import Demonstration
from polar_gym.learning.files import write_episodes
from polar_gym.learning.start import demonstrated
from tests.support.calls import make_call
from tests.support.episodes import make_episode

PLAN = {f"t{number}": Demonstration(["ls"], 0, solved=False) for number in range(20)}


def _played(directory: Path, failed: int) -> None:
    """Write 20 demonstrations, the first `failed` of which failed."""
    pytest.importorskip("pyarrow", reason="needs the extra `export`")
    episodes = [
        make_episode(
            f"s{number}", None if number < failed else 0.0, [make_call(0, [number], [7, 8])], task_id=f"t{number}"
        )
        for number in range(20)
    ]
    write_episodes(directory / "demonstrations.jsonl", episodes)


@pytest.mark.parametrize("failed", [0, 2])
def test_demonstrations_that_failed_are_told(tmp_path: Path, failed: int) -> None:
    """Guards against a start model of fewer rows, of which no line says why it is another one."""
    _played(tmp_path, failed)
    told: list[str] = []
    assert len(demonstrated(tmp_path, ["pi"], PLAN, told.append)) == 20 - failed
    assert [line.split("demonstrations.jsonl: ")[1] for line in told] == (
        ["2 of 20 demonstrations failed (2 x engine_error, e.g. 'gone'); the start model does without them"]
        * bool(failed)
    )


def test_many_demonstrations_that_failed_stop_the_run(tmp_path: Path) -> None:
    _played(tmp_path, failed=3)
    with pytest.raises(ConfigError, match=r"3 of 20 .* \(3 x engine_error, e\.g\. 'gone'\); mend"):
        demonstrated(tmp_path, ["pi"], PLAN, lambda line: None)


def test_demonstrations_that_ended_otherwise_than_planned_are_left_out(tmp_path: Path) -> None:
    """Guards against a start model that imitates commands which a harness did not run as they were planned: sessions
    that should have solved their tasks got 0, and no line said so."""
    _played(tmp_path, failed=1)
    solved = {f"t{number}": Demonstration(["ls"], 0, solved=True) for number in (0, 5)}
    told: list[str] = []
    rows = demonstrated(tmp_path, ["pi"], PLAN | solved, told.append)
    assert {row["task_id"] for row in rows} == PLAN.keys() - {"t0", "t5"}
    assert "2 of 20 demonstrations failed (1 x engine_error, e.g. 'gone'; 1 x another reward than planned)" in told[0]


@pytest.mark.parametrize(
    ("harnesses", "task_ids"),
    [(["codex"], PLAN.keys()), (["pi", "codex"], PLAN.keys()), (["pi"], [*PLAN, "t20"]), (["pi"], [*PLAN][:-1])],
)
def test_demonstrations_of_another_plan_are_refused(
    tmp_path: Path, harnesses: list[str], task_ids: Collection[str]
) -> None:
    """Guards against a start model that learns from another harness's or family's sessions, with its own leads."""
    _played(tmp_path, failed=0)
    plan = dict.fromkeys(task_ids, Demonstration(["ls"], 0, solved=False))
    with pytest.raises(ConfigError, match=r"demonstrations\.jsonl: its 20 demonstrations are not those of .* remove"):
        demonstrated(tmp_path, harnesses, plan, lambda line: None)


def test_new_demonstrations_begin_a_new_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a training that goes on with the weights for another tokenizer, where the demonstrations were
    removed and made again."""
    (tmp_path / start.BEGUN).touch()
    (tmp_path / "tasks.jsonl").touch()
    environments = mock.MagicMock()
    environments.return_value.__enter__.return_value.play.return_value = []
    monkeypatch.setattr(start, "Environments", environments)
    start.play_demonstrations(tmp_path, {}, tmp_path / "tasks.jsonl", [])
    assert not (tmp_path / start.BEGUN).exists()
    (tmp_path / start.BEGUN).touch()
    start.play_demonstrations(tmp_path, {}, tmp_path / "tasks.jsonl", [])
    assert (tmp_path / start.BEGUN).exists(), "the same demonstrations: the training goes on"
