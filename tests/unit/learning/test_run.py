"""A run in its directory: which runs go on there, and what a stopped run keeps."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from polar_gym.config.loading import load_config
from polar_gym.episodes.reading import read_episodes
from polar_gym.episodes.verify import verify
from polar_gym.errors import ConfigError
from polar_gym.harnesses import HARNESSES
from polar_gym.learning import start
from polar_gym.learning.families import write_tasks
from polar_gym.learning.grpo import Settings, rows_of
from polar_gym.learning.run import Plan, Run
from polar_gym.schema import Episode
from polar_gym.training import Batch
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking
from tests.support.task_files import ROW
from tests.support.tiny_model import write_tiny_model


def _run(directory: Path, day: str, seed: int = 0, settings: Sequence[str] = ()) -> Run:
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    config = load_config("learn", ["harness=pi", f"harness.today={day}", *settings])
    return Run(directory, Plan(family="trail", seed=seed), {"pi": config}, lambda line: None)


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Settings for two tasks of one's own and a tiny model."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    need_bubblewrap()
    write_tiny_model(tmp_path / "model")
    return {
        "tasks": {"name": "jsonl", "path": str(write_tasks(tmp_path, "trail", "train", 0, 2))},
        "engine": {"name": "embedded", "model_path": str(tmp_path / "model")},
        "harness": asking("ask(max_tokens=8)").model_dump(exclude={"today"}),
    }


def _own_run(
    directory: Path, own: dict[str, Any], steps: int, progress: Callable[[str], None] = lambda line: None
) -> Run:
    """A run of a task a step, whose two sessions have different rewards."""
    grpo = Settings(groups=1, samples=2)
    plan = Plan(family=None, steps=steps, evaluate_every=steps, held_out=1, final=1, places=2, grpo=grpo)
    return Run(directory, plan, {"command": load_config("learn", settings=own)}, progress, _one_is_better)


def _samples(run: Path) -> dict[str, list[tuple[str, int]]]:
    """Return what the seeds of a run's sessions are made of, by file."""
    return {
        path.name: [(episode.session.task_id, episode.session.sample_index) for episode in read_episodes(path)]
        for path in (run / "episodes").iterdir()
    }


def _one_is_better(episodes: Sequence[Episode]) -> Batch:
    return rows_of([episode.model_copy(update={"reward": float(place)}) for place, episode in enumerate(episodes)])


def test_a_model_in_bfloat16_without_a_pad_token_is_trained(tmp_path: Path, own: dict[str, Any]) -> None:
    """Guards against an end at the first update: the rounding of bfloat16 made the logprobs of trainer and engine
    differ, as if they had different weights."""
    transformers: Any = importlib.import_module("transformers")
    path = own["engine"]["model_path"]
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16").save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    (line,) = [line for line in _own_run(tmp_path / "run", own, steps=1).go() if "step" in line]
    assert line["rows"] == 2
    assert line["logprob_difference"] < 1e-3


async def test_the_sessions_of_a_run_can_be_verified(tmp_path: Path, own: dict[str, Any]) -> None:
    """Guards against journals that vanish with the run."""
    await asyncio.to_thread(_own_run(tmp_path / "run", own, steps=1).go)
    files = (tmp_path / "run" / "episodes").iterdir()
    verification = await verify([episode for path in files for episode in read_episodes(path)], None)
    assert verification.traces == 5, "two of the step, and one of each evaluation"
    assert verification.broken == []


def test_a_run_that_goes_on_has_the_seeds_of_a_whole_one(tmp_path: Path, own: dict[str, Any]) -> None:
    """Guards against step 2 with the seeds of step 1: a new process began to count a task's samples again."""

    def stop(line: str) -> None:
        if line.startswith("step 2"):
            raise KeyboardInterrupt

    _own_run(tmp_path / "whole", own, steps=2).go()
    with pytest.raises(KeyboardInterrupt):
        _own_run(tmp_path / "stopped", own, steps=2, progress=stop).go()
    _own_run(tmp_path / "stopped", own, steps=2).go()
    whole = _samples(tmp_path / "whole")
    assert whole == _samples(tmp_path / "stopped")
    assert len({*whole["step-001.jsonl"], *whole["step-002.jsonl"]}) == 4
    assert whole["held-out-000.jsonl"] != whole["held-out-002.jsonl"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_whose_sessions_all_fail_stops_and_says_why(tmp_path: Path, own: dict[str, Any], begun: bool) -> None:
    """Guards against an evaluation, or a step, of no session at all that is recorded as one with the reward 0."""
    figures = {"reward": 0.5, "interval": [0.0, 1.0]}
    lines = [{"evaluated": 0, "greedy": greedy, **figures} for greedy in (True, False)] if begun else []
    (tmp_path / "run").mkdir()
    written = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / "steps.jsonl").write_text(written)
    own["harness"] = asking("sys.exit('broken')").model_dump(exclude={"today"})
    where = r"step-001\.jsonl: none of 2" if begun else r"held-out-000-greedy\.jsonl: none of 1"
    with pytest.raises(
        ConfigError, match=rf"{where} sessions of command has a reward \([12] x harness_error, e\.g\. .*broken"
    ):
        _own_run(tmp_path / "run", own, steps=1).go()
    assert (tmp_path / "run" / "steps.jsonl").read_text() == written


def test_a_directory_has_one_run_at_a_time(tmp_path: Path, own: dict[str, Any]) -> None:
    """Guards against two runs of the same arguments that overwrite each other's weights and lines."""
    refused = []

    def another(line: str) -> None:
        with pytest.raises(ConfigError, match=r"--out=.*/run: another process trains there"):
            _own_run(tmp_path / "run", own, steps=1).go()
        refused.append(line)

    _own_run(tmp_path / "run", own, steps=1, progress=another).go()
    assert refused


def test_a_run_that_goes_on_tells_its_harness_the_day_on_which_it_began(tmp_path: Path) -> None:
    """Guards against a run that is refused, or has other prompts, after midnight."""
    _run(tmp_path, "2026-01-31")
    _run(tmp_path, "2026-02-01")
    assert json.loads((tmp_path / "plan.json").read_text())["configs"]["pi"]["harness"]["today"] == "2026-01-31"


def test_a_plan_holds_no_api_key(tmp_path: Path) -> None:
    """Guards against a secret that everyone can read who may read a run, and a run that is refused for a new one."""
    engine = '{name: vllm, url: "http://127.0.0.1:1", api_key: %s}'
    first, second = [
        [f"scoring.reference={engine % key}", f"proxy.frozen={{engine: {engine % key}}}"] for key in ("secret", "other")
    ]
    _run(tmp_path, "2026-01-31", settings=first)
    path = tmp_path / "plan.json"
    written = path.read_text()
    assert "secret" not in written
    assert written.count("http://127.0.0.1:1") == 2
    _run(tmp_path, "2026-01-31", settings=second)
    path.write_text(written.replace('"name": "vllm"', '"name": "vllm", "api_key": "secret"'))
    _run(tmp_path, "2026-01-31", settings=second)
    assert path.read_text() == written


def test_a_run_with_other_arguments_is_refused(tmp_path: Path) -> None:
    _run(tmp_path, "2026-01-31")
    with pytest.raises(ConfigError, match="a run with other arguments is there"):
        _run(tmp_path, "2026-01-31", seed=1)


@pytest.mark.parametrize("change", [{"version": "9.9.9"}, {"pypi_pins": ["litellm==9.9.9"]}], ids=str)
def test_a_run_of_another_version_of_the_harness_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Guards against a run that goes on with other prompts after an upgrade."""
    _run(tmp_path, "2026-01-31")
    known = HARNESSES.get("pi")
    monkeypatch.setattr(HARNESSES, "get", lambda name: replace(known, **change))
    now = ", ".join([change.get("version", known.version), *change.get("pypi_pins", [])])
    with pytest.raises(
        ConfigError,
        match=rf"--out=.*: the run there began with pi {known.version}, and this polar-gym has pi {now}, .*; choose",
    ):
        _run(tmp_path, "2026-01-31")


def test_a_run_that_began_before_versions_were_written_goes_on(tmp_path: Path) -> None:
    """Guards against directories that an upgrade makes useless; from then on the version is known."""
    _run(tmp_path, "2026-01-31")
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    versions = plan.pop("versions")
    path.write_text(json.dumps(plan))
    _run(tmp_path, "2026-02-01")
    assert json.loads(path.read_text())["versions"] == versions == {"pi": HARNESSES.get("pi").version}


def test_a_run_with_another_limit_of_time_is_refused(tmp_path: Path) -> None:
    """Guards against a curve of sessions with two limits: a session that time ended has the reward 0."""
    _run(tmp_path, "2026-01-31")
    with pytest.raises(ConfigError, match="a run with other arguments is there"):
        _run(tmp_path, "2026-01-31", settings=["rollout.timeout_seconds=5"])


def test_a_run_with_other_tasks_of_ones_own_is_refused(tmp_path: Path) -> None:
    """Guards against an evaluation on tasks that were trained on: one task more in the file moved all others. And
    against one curve over two gradings of the same ids."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    file = tmp_path / "tasks.jsonl"
    rows = [json.dumps({**ROW, "instance_id": f"t{number}"}) + "\n" for number in range(7)]
    own = ["tasks=jsonl", f"tasks.path={file}", f"engine.model_path={tmp_path}"]

    def prepare() -> None:
        Run(tmp_path / "run", Plan(family=None), {"codex": load_config("learn", own)}, lambda line: None).prepare()

    file.write_text("".join(rows[1:]))
    prepare()
    prepare()
    file.write_text("".join(rows))
    with pytest.raises(ConfigError, match=r"began with other tasks \(.*ids\.json\), and may have trained"):
        prepare()
    file.write_text("".join(rows[1:]).replace(ROW["problem_statement"], "another issue"))
    with pytest.raises(ConfigError, match=r"with the same ids: their texts or their tests have changed"):
        prepare()
    kept = tmp_path / "run" / "tasks" / "ids.json"
    kept.write_text(json.dumps({key: each for key, each in json.loads(kept.read_bytes()).items() if key != "digest"}))
    prepare()  # begun by an earlier checkout


def test_a_run_whose_first_harness_was_another_one_is_refused(tmp_path: Path) -> None:
    """Guards against a curve whose points are of two harnesses: evaluations on the way play in the first one."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    both = {name: load_config("learn", [f"harness={name}"]) for name in ("codex", "pi")}
    Run(tmp_path, Plan(family="trail"), both, lambda line: None)
    with pytest.raises(ConfigError, match="a run with other arguments is there"):
        Run(tmp_path, Plan(family="trail"), dict(reversed(both.items())), lambda line: None)


def test_demonstrations_have_the_places_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 16 demonstrations at once on a machine that was asked for fewer, or for more."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    given: list[int] = []

    def stop(*_: Any, places: int, **__: Any) -> None:
        given.append(places)
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "Environments", stop)
    config = load_config("learn", ["harness=codex"])
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, Plan(family="trail", places=3), {"codex": config}, lambda line: None).go()
    assert given == [3]


def test_a_step_that_was_written_before_the_first_save_is_not_written_twice(tmp_path: Path) -> None:
    """Guards against two lines of step 1 after a stop between the first step's line and its weights."""
    run = _run(tmp_path, "2026-01-31")
    lines: list[dict[str, Any]] = [{"cold_start": True}, {"evaluated": 0, "greedy": False}, {"step": 1}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run._restore(mock.Mock()) == 0
    assert run._written() == lines[:2]


def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run that is refused for good after a kill in the middle of a line."""
    whole = b'{"cold_start": true}\n{"evaluated": 0, "greedy": true}\n'
    (tmp_path / "steps.jsonl").write_bytes(whole + b'{"evaluated": 0, "gre')
    run = _run(tmp_path, "2026-01-31")
    monkeypatch.setattr(run, "_go", run._written)
    assert run.go() == [{"cold_start": True}, {"evaluated": 0, "greedy": True}]
    assert (tmp_path / "steps.jsonl").read_bytes() == whole


def test_a_line_of_a_run_is_on_the_disk_before_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that lacks its line: the weights after it are synced, and the machine stops."""
    synced: list[bytes] = []
    run, path = _run(tmp_path, "2026-01-31"), tmp_path / "steps.jsonl"
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    run._write({"cold_start": True, "cold_start_seconds": 1.0})
    assert synced == [path.read_bytes()]


def test_one_task_of_ones_own_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    """Guards against a ZeroDivisionError after both evaluations of the start model: one task is held out."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    own = ["tasks=jsonl", f"tasks.path={tmp_path / 'tasks.jsonl'}", f"engine.model_path={tmp_path}"]
    run = Run(tmp_path / "run", Plan(family=None), {"codex": load_config("learn", own)}, lambda line: None)
    with pytest.raises(ConfigError, match=r"tasks=jsonl: found 1, .* name at least two"):
        run.go()
