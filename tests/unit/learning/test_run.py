"""A run in its directory: which runs go on there, and what a stopped run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.learning.run import Plan, Run
from tests.support.task_files import ROW


def _run(directory: Path, day: str, seed: int = 0) -> Run:
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    config = load_config("learn", ["harness=pi", f"harness.today={day}"])
    return Run(directory, Plan(family="trail", seed=seed), {"pi": config}, lambda line: None)


def test_a_run_that_goes_on_tells_its_harness_the_day_on_which_it_began(tmp_path: Path) -> None:
    """Guards against a run that is refused, or has other prompts, after midnight."""
    _run(tmp_path, "2026-01-31")
    _run(tmp_path, "2026-02-01")
    assert json.loads((tmp_path / "plan.json").read_text())["configs"]["pi"]["harness"]["today"] == "2026-01-31"


def test_a_run_with_other_arguments_is_refused(tmp_path: Path) -> None:
    _run(tmp_path, "2026-01-31")
    with pytest.raises(ConfigError, match="a run with other arguments is there"):
        _run(tmp_path, "2026-01-31", seed=1)


def test_a_step_that_was_written_before_the_first_save_is_not_written_twice(tmp_path: Path) -> None:
    """Guards against two lines of step 1 after a stop between the first step's line and its weights."""
    run = _run(tmp_path, "2026-01-31")
    lines: list[dict[str, Any]] = [{"cold_start": True}, {"evaluated": 0, "greedy": False}, {"step": 1}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run._restore(mock.Mock()) == 0
    assert run._written() == lines[:2]


def test_one_task_of_ones_own_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    """Guards against a ZeroDivisionError after both evaluations of the start model: one task is held out."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    own = ["tasks=jsonl", f"tasks.path={tmp_path / 'tasks.jsonl'}", f"engine.model_path={tmp_path}"]
    run = Run(tmp_path / "run", Plan(family=None), {"codex": load_config("learn", own)}, lambda line: None)
    with pytest.raises(ConfigError, match=r"tasks=jsonl: found 1, .* name at least two"):
        run.go()
