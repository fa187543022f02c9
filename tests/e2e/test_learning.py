"""A policy learns through the real codex: the short form of `make show-learning`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.vllm_server import INSTALL, vllm_python
from tests.support.requirements import need


@pytest.mark.timeout(3600)
def test_the_reward_on_held_out_tasks_rises(tmp_path: Path) -> None:
    python, results = vllm_python(), tmp_path / "learning.json"
    need(python, "torch", INSTALL)
    arguments = [str(python), "-m", "tests.show.learning", "--quick", "--results", str(results)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (points,) = json.loads(results.read_text())["figures"].values()
    first, *_, last = (reward for reward, _, _ in points.values())
    assert last >= first + 0.2
