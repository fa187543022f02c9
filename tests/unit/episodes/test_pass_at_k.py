"""pass@k: the estimator against its definition, the interval, and what `polar-gym eval` makes of files."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.cli import main
from polar_gym.episodes.pass_at_k import of_task, pass_at_k, tally, usual_ks, wilson
from polar_gym.schema import Episode, Failure, StartFrom, Status
from tests.support.episodes import make_episode


@given(data=st.data(), scored=st.integers(1, 8))
def test_the_estimate_is_the_share_of_all_draws_that_hold_a_pass(data: st.DataObject, scored: int) -> None:
    passes, k = data.draw(st.integers(0, scored)), data.draw(st.integers(1, scored))
    draws = list(combinations(range(scored), k))
    share = sum(any(sample < passes for sample in draw) for draw in draws) / len(draws)
    assert of_task(scored, passes, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 4])
def test_no_estimate_of_more_samples_than_there_are(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}: expected 1 to 3"):
        of_task(3, 1, k)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (1.0, 5, 0.5655, 1.0), (0.3, 500, 0.2615, 0.3416)],
)
def test_wilsons_interval(share: float, count: int, low: float, high: float) -> None:
    """At n = 10 the two are the textbook's: 0.24 to 0.76 for one half, and at most 0.28 for none."""
    assert wilson(share, count) == pytest.approx((low, high), abs=1e-4)


@given(share=st.floats(0, 1), count=st.integers(1, 1000))
def test_the_interval_holds_the_share(share: float, count: int) -> None:
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert low < high


def episodes() -> list[Episode]:
    """Task a passes 1 of 2, b 2 of 2 with one masked, c is masked whole."""
    return [
        make_episode("1", 0.0, task_id="a", repo="x/x", resolved=False, truncated_by="time"),
        make_episode("2", 1.0, task_id="a", repo="x/x", resolved=True),
        make_episode("3", 1.0, task_id="b", repo="y/y"),
        make_episode("4", 0.4, task_id="b", repo="y/y", resolved=True),
        make_episode("5", None, task_id="b", repo="y/y"),
        make_episode("6", None, task_id="c", repo="y/y"),
    ]


def test_masked_episodes_are_counted_apart() -> None:
    tallies = tally(episodes())
    counts = [(each.task_id, each.scored, each.passed, each.masked, each.truncated) for each in tallies]
    assert counts == [("a", 2, 1, 0, 1), ("b", 2, 2, 1, 0), ("c", 0, 0, 1, 0)]
    assert usual_ks(tallies) == [1, 2]
    one, two, three = (pass_at_k(tallies, k) for k in (1, 2, 3))
    assert (one.value, one.tasks, one.left_out) == (0.75, 2, 1)
    assert (two.value, two.tasks) == (1.0, 2)
    assert (three.value, three.low, three.tasks, three.left_out) == (None, None, 0, 3)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The six episodes, in two files."""
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, part in zip(paths, (episodes()[:3], episodes()[3:]), strict=True):
        path.write_bytes(b"".join(episode.to_json() + b"\n" for episode in part))
    return [str(path) for path in paths]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_eval_of_files_as_json(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", *files, "--json", "--k", "1", "--k", "3") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    counts = [report[name] for name in ("tasks", "episodes", "scored", "masked", "truncated")]
    assert counts == [3, 6, 4, 2, 1]
    assert [estimate["value"] for estimate in report["pass_at_k"]] == [0.75, None]
    assert report["by_repo"]["y/y"]["pass_at_k"][0]["value"] == 1.0
    assert report["by_repo"]["y/y"]["masked"] == 2
    assert [task["mean_reward"] for task in report["by_task"]] == [0.5, 0.7, None]


def test_eval_of_files_as_tables(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", *files) == 0
    said = capsys.readouterr().out
    assert "pass@1 0.750 (95 %: 0.198 to 0.973), over 2 tasks; 1 tasks have fewer samples" in said
    assert "4 of 6 episodes scored, 1 of them ended by a budget; 2 masked" in said
    assert "y/y" in said


def started_from(session_id: str, start: StartFrom) -> Episode:
    episode = make_episode(session_id, 1.0, task_id="a")
    return episode.model_copy(update={"request": episode.request.model_copy(update={"start_from": start})})


def test_samples_with_the_same_seeds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against the same session twice, of two runs with one seed, as two independent samples."""
    path = tmp_path / "twice.jsonl"
    for seeds, code in (((1, 1), 2), ((1, 2), 0), ((None, None), 0)):
        made = [make_episode(name, 1.0, task_id="a") for name in ("x", "y")]
        for episode, seed in zip(made, seeds, strict=True):
            episode.request.sampling = episode.request.sampling.model_copy(update={"seed": seed})
        path.write_bytes(b"".join(episode.to_json() + b"\n" for episode in made))
        assert run("eval", str(path)) == code
    assert "sessions x and y are sample 0 of task 'a' with sampling.seed=1" in capsys.readouterr().err


def test_a_session_that_began_again_is_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a sample that counts twice: masked, and as the session that took its place."""
    first = started_from("x", StartFrom(record="state/0", owned=True))
    failure = Failure(stage=Status.RUNNING, kind="diverged", message="another prompt")
    first = first.model_copy(update={"reward": None, "session": first.session.model_copy(update={"failure": failure})})
    path = tmp_path / "again.jsonl"
    path.write_bytes(b"".join(each.to_json() + b"\n" for each in (first, make_episode("y", 1.0, task_id="a"))))
    assert run("eval", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["episodes"], report["masked"], report["begun_again_left_out"]) == (1, 0, 1)


def test_branches_are_no_samples_of_their_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against the branches of one good session that lift pass@k of its task."""
    samples = [
        make_episode("1", 0.0, task_id="a"),
        started_from("resumed", StartFrom(record="state/0", calls=2, owned=True)),
        started_from("from the start", StartFrom(record="state/0", calls=0)),
    ]
    branches = [started_from(f"branch {number}", StartFrom(record="state/0", calls=2)) for number in range(2)]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"".join(episode.to_json() + b"\n" for episode in [*samples, *branches]))
    assert run("eval", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["episodes"], report["branches_left_out"]) == (3, 2)
    assert report["pass_at_k"][0]["value"] == pytest.approx(2 / 3)
    assert run("eval", str(path)) == 0
    assert "2 branches of other episodes left out" in capsys.readouterr().out
    path.write_bytes(b"".join(episode.to_json() + b"\n" for episode in branches))
    assert run("eval", str(path)) == 1, "nothing is left to score"


def test_nothing_scored_is_exit_code_one(tmp_path: Path) -> None:
    path = tmp_path / "masked.jsonl"
    path.write_bytes(episodes()[-1].to_json() + b"\n")
    assert run("eval", str(path)) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.jsonl"], "nope.jsonl: No such file"),
        (["FILE", "harness=pi"], "give files of episodes, or a recipe and settings, not both"),
        (["nope"], "nope"),
        (["FILE", "--config-dir", "own"], "--config-dir='own': has no effect on files of episodes; leave it out"),
    ],
)
def test_wrong_arguments(files: list[str], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", *(files[0] if argument == "FILE" else argument for argument in arguments)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("name", "options"), [("demo", []), ("own", ["--config-dir", "configs"])])
def test_a_recipe_counts_as_such_where_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, options: list[str]
) -> None:
    """Guards against the checkout's script `demo`, which was read as a file of episodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "own.yaml").write_text("defaults: [config, _self_]")
    (tmp_path / name).write_text("no episodes")
    assert run("eval", name, "tasks.limit=none", *options) == 2
    assert "tasks.limit='none'" in capsys.readouterr().err, "the recipe is composed"
    assert run("eval", f"./{name}") == 2
    assert f"{name}:1: not JSON" in capsys.readouterr().err


PI = "harness=pi profile=default model=policy"
TASKS = "the episodes of task 'task' have several instructions, time limits (timeout_seconds) or evaluators"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"harness": "codex"}, f"of 2 agents: harness=codex profile=default model=policy; {PI}"),
        ({"profile": "lean"}, f"of 2 agents: {PI}; harness=pi profile=lean model=policy"),
        ({"command": "b"}, f'of 2 agents: {PI}; harness=pi {{"command": "b"}} profile=default'),
        ({"model": "other"}, f"of 2 agents: harness=pi profile=default model=other; {PI}"),
        ({"temperature": 0.2}, f"of 2 agents: {PI}; {PI} temperature=0.2"),
        ({"weight_version": "step-5"}, f"of 2 agents: {PI}; {PI} weight_version=step-5"),
        ({"max_output_tokens": 64}, f"of 2 agents: {PI}; {PI} max_output_tokens=64"),
        ({"max_calls": 3}, f"of 2 agents: {PI}; {PI} max_calls=3"),
        ({"timeout_seconds": 7.0}, TASKS),
        ({"instruction": "other"}, TASKS),
    ],
)
def test_agents_are_no_samples_of_each_other(
    change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a pass@2 that no agent has: `polar-gym eval pi.jsonl codex.jsonl` took one sample of each, and two
    checkpoints under one name counted as one policy."""
    one, other = make_episode("1", 0.0), make_episode("2", 1.0)
    ((name, value),) = change.items()
    request = other.request
    records = {
        **{"harness": other.session, "weight_version": other.session, "model": other.engine},
        **{"temperature": request.sampling, "max_calls": request.budget},
        **dict.fromkeys(("timeout_seconds", "instruction"), request),
    }
    record = records.get(name, other.request.agent)
    setattr(record, name, value)
    files = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    for file, episode in zip(files, (one, other), strict=True):
        file.write_bytes(episode.to_json() + b"\n")
    assert run("eval", *map(str, files)) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "keep their episodes in files of their own" in said
    other.reward = None  # a masked episode is in no estimate
    files[1].write_bytes(other.to_json() + b"\n")
    assert run("eval", *map(str, files)) == 0
