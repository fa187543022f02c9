"""RL data: a row gives its trace back, whatever reads the file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from polar_gym.builders.trace import SHAPING
from polar_gym.cli import app
from polar_gym.errors import ConfigError
from polar_gym.export.rl import COLUMNS, export_rl, to_trace
from polar_gym.schema import Episode, EvaluationResult, Replayed, StartFrom, Trace, WeightVersion
from tests.support.calls import make_call
from tests.support.choices import recorded_episode
from tests.support.episodes import make_episode, sessions
from tests.unit.export.graded_episodes import graded_episode, make_trace, row_groups, with_traces

DOCS = Path(__file__).parents[3] / "docs" / "training.md"


def exported(directory: Path, *episodes: Episode) -> Any:
    """Return the exported rows as `datasets` loads them."""
    export_rl(episodes, directory / "rl.parquet")
    return datasets.load_dataset(
        "parquet", data_files=str(directory / "rl.parquet"), split="train", cache_dir=str(directory / "cache")
    )


def asked(episode: Episode, trace: Trace) -> dict[str, Any]:
    """Return how a trace was sampled, without what is null in a row."""
    sampled = episode.sampled_with(trace)
    return {name: sampled[name] for name in SHAPING if sampled.get(name) is not None}


def branch() -> Episode:
    """Return a session that begins with a call of another one."""
    first = make_call(0, [1], [2, 3]).model_copy(update={"replayed": Replayed(session_id="first", owned=False)})
    episode = make_episode("branch", 1.0, [first, make_call(1, [1, 2, 3, 4], [5])])
    episode.request.start_from = StartFrom(record="/state/sessions/first", calls=1)
    return episode


@settings(max_examples=5)  # each loads a data set
@given(sessions())
def test_every_trace_comes_back_whole(episodes: list[Episode]):
    episodes += [
        recorded_episode("recorded"),
        recorded_episode("lost", lost=[0, 1]),
        graded_episode("graded"),
        branch(),
    ]
    with tempfile.TemporaryDirectory() as directory:
        rows = list(exported(Path(directory), *episodes))
    traces = [(episode, trace) for episode in episodes for trace in episode.trajectory.traces]
    assert rows[-1]["branched_from"] == "first"
    assert len(rows) == len(traces)
    for row, (episode, trace) in zip(rows, traces, strict=True):
        expected = trace.model_copy(update={"reward": episode.reward, "sampling": asked(episode, trace)})
        if trace.routed_experts is not None:
            expected.routed_experts = trace.routed_experts.astype(np.int64)  # as lists come back
        assert to_trace(row).to_json() == expected.to_json()
        assert (row["task_id"], row["group"]) == (episode.session.task_id, episode.group)
        assert row["fidelity"] == episode.trajectory.fidelity.model_dump()
        assert (row["reward"] is None) == (row["failure"] is not None)
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])


def test_columns_have_the_types_of_trainers(tmp_path):
    features = exported(tmp_path, graded_episode()).features
    assert list(features) == list(COLUMNS)
    for name, dtype in {"input_ids": "int32", "loss_mask": "int8", "logprobs": "float32"}.items():
        assert features[name].feature.dtype == dtype
    assert features["reward"].dtype == "float64"
    assert features["routed_experts"].feature.feature.feature.dtype == "int16"


def test_rewards_versions_and_images_are_told(tmp_path):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    versions = [WeightVersion(version="step-1", start=0, end=2), WeightVersion(version="step-2", start=3, end=4)]
    said = EvaluationResult(evaluator="composite", reward=0.5, components={"tests": 1.0, "style": 0.0})
    episode = with_traces("s", make_trace(messages=image, weight_versions=versions), evaluation=said, reward=0.5)
    (row,) = exported(tmp_path, episode)
    assert (row["reward"], row["components"]) == (0.5, said.components)
    assert [(each["version"], each["start"], each["end"]) for each in row["weight_versions"]] == [
        ("step-1", 0, 2),
        ("step-2", 3, 4),
    ]
    assert row["messages"] == image


def test_rows_are_written_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("polar_gym.export.rows.GROUP_TOKENS", 14)  # a trace has 7
    loaded = exported(tmp_path, *(graded_episode(f"s{number}") for number in range(5)))
    assert row_groups(tmp_path / "rl.parquet") == [2, 2, 1]
    assert list(loaded["session_id"]) == [f"s{number}" for number in range(5)]


def test_rows_with_many_experts_are_written_in_groups(tmp_path, monkeypatch):
    """Guards against lists of experts that are too long for Arrow's offsets: a token may have thousands of numbers."""
    monkeypatch.setattr("polar_gym.export.rows.MOST_NUMBERS", 32)  # a trace has 16: 10 of experts, 6 of kept tokens
    export_rl([recorded_episode(f"s{number}") for number in range(3)], tmp_path / "rl.parquet")
    assert row_groups(tmp_path / "rl.parquet") == [2, 1]


def test_a_file_is_never_written_over(tmp_path):
    file = tmp_path / "thesis.parquet"
    file.write_text("years of work")
    with pytest.raises(ConfigError, match="is there already; name a new file"):
        export_rl([graded_episode()], file)
    assert file.read_text() == "years of work"


def test_the_command_counts_what_is_masked(tmp_path):
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"".join(each.to_json() + b"\n" for each in (graded_episode(), make_episode("t", None))))
    done = CliRunner().invoke(app, ["export", "rl", str(file), "--out", str(tmp_path / "new" / "rl.parquet")])
    assert done.exit_code == 0, done.output
    said = "1 traces of 2 episodes (1 masked, 1 without a trace), 3 of 7 tokens trainable"
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("command", [["export", "rl", "--out"], ["eval", "--json"]], ids=lambda each: each[0])
@pytest.mark.parametrize("name", ["one.jsonl", "copy.jsonl"])
def test_a_session_counts_once(tmp_path, command, name):
    """Guards against a file that is named twice, whose rows are trained twice, and whose samples narrow an interval."""
    for file in ("one.jsonl", "copy.jsonl"):
        (tmp_path / file).write_bytes(graded_episode("s").to_json() + b"\n")
    first, again, out = tmp_path / "one.jsonl", tmp_path / name, tmp_path / "rl.parquet"
    out_option = [str(out)] if "--out" in command else []
    done = CliRunner().invoke(app, [*command, *out_option, str(first), str(again)])
    assert isinstance(done.exception, ConfigError)
    assert f"{again}: session s.0 is in {first} already, and would count twice" in str(done.exception)
    assert not out.exists()


def test_every_column_is_documented():
    rows = [f"| `{name}` | {meaning} |" for name, (_, meaning) in COLUMNS.items()]
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")
