"""A run in its directory: which runs go on there, and what a stopped run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.learning.run import Plan, Run


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
