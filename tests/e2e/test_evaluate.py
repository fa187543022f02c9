"""`polar-gym eval` that rolls out first: the same command line as `polar-gym rollout`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from polar_gym.episodes.output import set_aside
from polar_gym.episodes.reading import read_episodes
from tests.support.requirements import need_bubblewrap


def test_eval_rolls_out_and_reports(tmp_path: Path) -> None:
    need_bubblewrap()
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


def test_a_second_run_keeps_the_first_ones_episodes(tmp_path: Path) -> None:
    """Guards against rollouts that took hours and are overwritten without a word."""
    need_bubblewrap()
    output = tmp_path / "night.jsonl"
    settings = ["harness=command", "harness.command=ls", "runtime=bubblewrap", "tasks.limit=1"]
    program = Path(sys.executable).with_name("polar-gym")
    said, sessions = [], []
    for _ in range(3):
        command = [program, "rollout", *settings, f"rollout.output={output}"]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=100).stdout)
        (episode,) = read_episodes(output)
        sessions.append(episode.session.session_id)
    assert "are kept" not in said[0]
    for number in (1, 2):
        kept = tmp_path / f"night.{number}.jsonl"
        assert f"kept in {kept}" in said[number]
        assert [episode.session.session_id for episode in read_episodes(kept)] == [sessions[number - 1]]


def test_what_is_kept_through_a_link_and_what_is_no_file_of_ours(tmp_path: Path) -> None:
    target, link = tmp_path / "episodes.jsonl", tmp_path / "latest"
    assert set_aside(target) is None
    target.touch()
    assert set_aside(target) is None, "nothing is in it"
    target.write_text("precious")
    link.symlink_to(target)
    assert set_aside(link) == tmp_path / "episodes.1.jsonl"
    assert (link.is_symlink(), target.exists()) == (True, False)
    with target.open("w") as redirected:
        redirected.write("precious")
        redirected.flush()
        assert set_aside(Path(f"/dev/fd/{redirected.fileno()}")) is None
    assert target.read_text() == "precious"
