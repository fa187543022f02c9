"""The Python of docs/ runs as it stands there."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar_gym.cli import main
from polar_gym.schema import EvaluatorSpec
from tests.e2e.play import make, play
from tests.support.evaluations import make_context
from tests.support.made_runs import made_run, write_run
from tests.support.requirements import need_bubblewrap, need_node


def block(says: str) -> str:
    """Return the only Python block of docs/ with these words."""
    pages = "".join(page.read_text() for page in Path("docs").glob("*.md"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    (found,) = [text for text in blocks if says in text]
    return found


def run(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout


def test_the_vector_environment_and_a_grpo_batch(tmp_path: Path) -> None:
    """With four sessions instead of sixteen."""
    need_node()
    need_bubblewrap()
    program = block("envs = gym.make_vec(")
    for words, fewer in (("num_envs=16", "num_envs=4"), ("tasks[:4]", "tasks[:1]"), ("multiple_of=8", "multiple_of=3")):
        assert words in program
        program = program.replace(words, fewer)
    said = run(program, tmp_path)
    assert "rows=4" in said
    assert "zero_variance_groups=1" in said
    assert "inert_rows=2" in said
    assert "'rewards': (6,)" in said
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    """As far as it goes without a vLLM: whatever is wrong with the arguments is said when it is made."""
    (tmp_path / "my-project").mkdir()
    made = run(f"import gymnasium as gym, polar_gym\n{block('polar/task')}print(env.unwrapped)", tmp_path)
    assert "TaskEnv" in made


def test_a_request_in_polars_form(tmp_path: Path) -> None:
    assert run(block("TaskRequest.model_validate"), tmp_path) == "fix-1 16\n"


def test_values_of_a_trainer(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "demo.jsonl", made_run(1, 2))
    run(block("write_annotations("), tmp_path)
    assert '"probability":[1.0,1.0,' in (tmp_path / "notes.jsonl").read_text()


def test_a_reward_of_ones_own() -> None:
    names: dict[str, Any] = {}
    exec(block("class SmallDiff"), names)
    evaluator = names["SmallDiff"](names["MostLines"](most=1))
    rewards = []
    for added in (b"", b"+one\n", b"+one\n+two\n"):
        context = make_context(EvaluatorSpec(name="small_diff"), [], diff=b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n" + added)
        rewards.append(asyncio.run(evaluator.evaluate(context)).reward)
    assert rewards == [0.0, 1.0, 0.0]


def test_a_harness_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a CLI of npm that does not come with polar-gym: some rows of the check, and a task."""
    need_node()
    need_bubblewrap()
    (tmp_path / "my_continue.py").write_text(block('npm_package="@continuedev/cli"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = ("tool calls", "compaction", "kinds", "MCP", "stable prompts")
    words = ["my_continue:HARNESS", "--runtime", "bubblewrap", "--json", *(f"--row={row}" for row in rows)]
    with pytest.raises(SystemExit):
        main(["harness", "check", *words])
    (found,) = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in found["rows"]] == ["pass"] * len(rows), found
    env = make(tmp_path, harness={"name": "my_continue:HARNESS"}, runtime="bubblewrap")
    try:
        reward, _, _, episode = play(env)
    finally:
        env.close()
    assert reward == 1.0, episode.session.failure
