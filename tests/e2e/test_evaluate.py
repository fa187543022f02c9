"""`polar-gym eval` that rolls out first: the same command line as `polar-gym rollout`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from polar_gym.report import read_episodes
from tests.requirements import need_program


def test_eval_rolls_out_and_reports(tmp_path: Path) -> None:
    need_program("bwrap", "apt-get install bubblewrap")
    output = tmp_path / "episodes.jsonl"
    settings = [
        *("harness=python", "harness.target=tests.e2e.own_agent:solve", "runtime=bubblewrap"),
        *("tasks.limit=2", "rollout.num_samples=2", f"rollout.output={output}"),
    ]
    program = Path(sys.executable).with_name("polar-gym")
    done = subprocess.run(
        [program, "eval", *settings, "--json"], capture_output=True, text=True, timeout=200, check=True
    )
    report = json.loads(done.stdout)
    assert [(each["k"], each["value"], each["tasks"]) for each in report["pass_at_k"]] == [(1, 1.0, 2), (2, 1.0, 2)]
    assert report["scored"] == len(list(read_episodes(output))) == 4
