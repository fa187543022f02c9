"""SFT data: what is accepted, what a row is, and a directory that grows and survives a kill."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_gym.builders import build_trajectory
from polar_gym.cli import app
from polar_gym.console import console
from polar_gym.errors import ConfigError
from polar_gym.export import sft
from polar_gym.export.acceptance import Filters, refusal, trace_refusal
from polar_gym.export.dataset import SftDataset
from polar_gym.export.rows import to_json_line, to_row, to_table
from polar_gym.export.sft import export_sft
from polar_gym.schema import (
    BuilderSpec,
    EngineInfo,
    EvaluationResult,
    EvaluatorSpec,
    Failure,
    Session,
    Status,
)
from tests.support.calls import make_call
from tests.support.choices import experts, recorded_episode
from tests.unit.export.graded_episodes import SAMPLING, TOOL, call, graded_episode, make_trace, row_groups, with_traces


def rows(directory: Path, cache: Path) -> list[dict[str, Any]]:
    loaded = datasets.load_dataset(str(directory), cache_dir=str(cache))
    return [dict(row) for split in loaded.values() for row in split]


# What is accepted -----------------------------------------------------------------------------------------------------

SCRIPTED = EngineInfo(name="embedded", model="policy", scripted=True, max_model_len=100)
FAILED = Session(
    session_id="s",
    task_id="t",
    sample_index=0,
    harness="pi",
    failure=Failure(stage=Status.RUNNING, kind="engine_error", message="gone"),
)
CUT_OFF = Session(session_id="s", task_id="t", sample_index=0, harness="pi", truncated_by="time")


@pytest.mark.parametrize(
    ("changes", "filters", "reason"),
    [
        ({}, {}, None),
        ({"tests": {"a": "PASSED", "b": "FAILED"}}, {}, "unresolved"),
        ({"tests": {"a": "PASSED", "b": "FAILED"}}, {"min_reward": 0.0}, None),
        ({"reward": 0.5}, {"min_reward": 0.6}, "reward"),
        ({"evaluation": None}, {}, "unresolved"),
        ({"session": FAILED}, {}, "failed"),
        ({"reward": None}, {"min_reward": 0.0}, "failed"),
        ({"engine": SCRIPTED}, {}, "scripted"),
        ({"engine": SCRIPTED}, {"allow_scripted": True}, None),
        ({"session": CUT_OFF}, {}, None),
        ({"session": CUT_OFF}, {"allow_truncated": False}, "truncated"),
    ],
)
def test_an_episode_is_refused_for_a_named_reason(changes, filters, reason):
    assert refusal(graded_episode(**changes), Filters(**filters)) == reason


def test_resolved_is_not_believed_where_a_test_did_not_pass():
    said = EvaluationResult(evaluator="swe", reward=1.0, resolved=True, tests={"a": "PASSED", "b": "SKIPPED"})
    assert refusal(graded_episode(evaluation=said, reward=1.0), Filters()) == "unresolved"
    skipped = said.model_copy(update={"evaluator": "test_on_output"})  # it takes a skipped test for one that passed
    assert refusal(graded_episode(evaluation=skipped, reward=1.0), Filters()) is None


@pytest.mark.parametrize(("part", "reason"), [("test_on_output", None), ("swe", "unresolved")])
def test_a_test_that_a_part_may_skip_is_good_in_a_composite(part: str, reason: str | None) -> None:
    """Guards against a data set without any episode of a composite around `test_on_output` where a test is skipped."""
    said = EvaluationResult(evaluator="composite", reward=1.0, resolved=True, tests={"unit: a": "SKIPPED"})
    episode = graded_episode(evaluation=said, reward=1.0)
    spec = EvaluatorSpec.model_validate({"name": "composite", "components": {"unit": {"name": part}}})
    episode.request.evaluator = spec
    assert refusal(episode, Filters()) == reason


@pytest.mark.parametrize(
    ("changes", "filters", "reason"),
    [
        ({}, {"max_tokens": 7}, None),
        ({}, {"max_tokens": 6}, "too long"),
        ({"loss_mask": [0, 0, 0, 0]}, {}, "nothing trainable"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "multimodal"),
    ],
)
def test_a_trace_is_left_out_for_a_named_reason(changes, filters, reason):
    assert trace_refusal(make_trace(**changes), Filters(**filters)) == reason


def test_the_embedded_engine_stamps_its_scripted_policy():
    from polar_gym.engines.embedded.engine import EmbeddedEngine

    assert EmbeddedEngine(EmbeddedEngine.Options(scripts=[])).info.scripted
    assert not graded_episode().engine.scripted


# What a row is --------------------------------------------------------------------------------------------------------


def test_a_row_holds_the_exact_ids_and_masks_and_says_the_same_as_chat(tmp_path):
    (entry,) = export_sft([graded_episode()], tmp_path / "out", Filters())
    (row,) = rows(tmp_path / "out", tmp_path / "cache")
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["assistant_masks"] == [0, 0, 0, 1, 1, 0, 1]
    assert row["sampling"] == {**SAMPLING, "logprobs_mode": None}
    assert row["tools"] == [TOOL]
    assert row["messages"] == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Fix it."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look first.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
            ],
        },
        {"role": "tool", "content": "a.py", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Done."},
    ]
    (example,) = entry.examples
    assert (example.messages, example.turns, example.tokens, example.trainable_tokens) == (5, 2, 7, 3)


def test_an_answer_that_is_context_of_another_trace_counts_once(tmp_path: Path) -> None:
    """Guards against 12 turns of a session with 7 answers, whose compaction had the first five as context."""
    main = make_call(0, [1], [2])
    fork, rest = make_call(1, [1, 2, 5], [6]), make_call(2, [1, 2, 3], [4])
    calls = [call.model_copy(update={"messages": [say("user", "x")]}) for call in (main, fork, rest)]
    trajectory = build_trajectory(calls, BuilderSpec(name="prefix_merging"))
    assert [len(trace.turns) for trace in trajectory.traces] == [2, 2], "the first answer is in both"
    (entry,) = export_sft([graded_episode(trajectory=trajectory)], tmp_path / "out", Filters())
    assert sum(example.turns for example in entry.examples) == 3, entry.left_out


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_row_names_the_messages_that_it_trains(tmp_path):
    """Guards against a loss on all assistant messages, for a model with another tokenizer: it would train examples of
    the prompt, and an answer before a fork twice."""
    asked = [say("user", "2 + 2?"), say("assistant", "4"), say("user", "Fix it.")]
    shared = [*asked, say("assistant", "ls")]
    calls = [
        make_call(0, [1], [2], messages=asked, response=shared[-1]),
        make_call(1, [1, 2, 9], [3, 4], messages=[*shared, say("tool", "a.py")], response=say("assistant", "cat a.py")),
        make_call(2, [1, 2, 8], [5], messages=[*shared, say("user", "Stop.")], response=say("assistant", "Yes.")),
    ]
    trajectory = build_trajectory(calls, BuilderSpec(name="prefix_merging"))
    export_sft([graded_episode(trajectory=trajectory)], tmp_path / "out", Filters())
    found = {row["trace_id"]: row for row in rows(tmp_path / "out", tmp_path / "cache")}
    assert {name: row["trained"] for name, row in found.items()} == {
        "s/call1": [False, False, False, True, False, True],
        "s/call2": [False, False, False, False, False, True],
    }
    trained = [row["messages"][n]["content"] for row in found.values() for n, own in enumerate(row["trained"]) if own]
    assert sorted(trained) == ["Yes.", "cat a.py", "ls"], "each answer once"


def test_messages_of_an_earlier_version_are_not_said_to_be_trained(tmp_path):
    """Guards against flags at the wrong messages: the episode does not say where its answers stand."""
    trajectory = build_trajectory([make_call(0, [1], [2])], BuilderSpec(name="per_request"))  # it has no answer's text
    episodes = [graded_episode("without turns"), graded_episode("without a place", trajectory=trajectory)]
    export_sft(episodes, tmp_path / "out", Filters())
    assert [row["trained"] for row in rows(tmp_path / "out", tmp_path / "cache")] == [None] * 2


@pytest.mark.parametrize("arguments", ['{"command": "ls', "[1]", '"ls"', "not json"])
def test_a_broken_tool_call_stays_what_the_policy_wrote(tmp_path, arguments):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call(arguments)]}]
    export_sft([with_traces("s", make_trace(messages=messages))], tmp_path / "out", Filters())
    (row,) = rows(tmp_path / "out", tmp_path / "cache")
    (kept,) = row["messages"][1]["tool_calls"]
    assert kept["function"]["arguments"] == arguments


def test_jsonl_and_parquet_hold_the_same(tmp_path):
    export_sft([graded_episode("s"), with_traces("t", make_trace("t", 9))], tmp_path / "out", Filters())
    (path,) = (tmp_path / "out" / "jsonl").iterdir()
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows(tmp_path / "out", tmp_path / "cache")


# A directory that grows -----------------------------------------------------------------------------------------------


def test_experts_and_kept_tokens_are_columns(tmp_path):
    episode, plain = recorded_episode(), recorded_episode("other", lost=[0, 1])
    table = to_table([to_row(each, each.trajectory.traces[0]) for each in (episode, plain)])
    pq.write_table(table, tmp_path / "rows.parquet")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    told = orjson.loads(to_json_line(to_row(episode, episode.trajectory.traces[0])))
    for row in (told, loaded[0], table.to_pylist()[0]):
        assert row["routed_experts"] == experts([1, 2, 3, 4, 5]).tolist()
        assert row["kept_ids"] == [[], [], [3, 7], [], [5, 7], [6, 7]]
    assert (loaded[1]["routed_experts"], loaded[1]["kept_ids"]) == (None, None)


def test_a_second_run_adds_only_what_is_new(tmp_path):
    out, first, second = tmp_path / "out", graded_episode("s"), with_traces("t", make_trace("t", 9), repo="other/repo")
    export_sft([first], out, Filters())
    files = {path: path.read_bytes() for path in out.rglob("*-00000.*")}
    assert len(export_sft([first], out, Filters())) == 1
    assert len(export_sft([first, second], out, Filters())) == 2
    assert {path: path.read_bytes() for path in out.rglob("*-00000.*")} == files
    assert {row["session_id"] for row in rows(out, tmp_path / "cache")} == {"s", "t"}


def test_a_part_holds_no_more_experts_than_arrow_can(tmp_path, monkeypatch):
    """Guards against lists of experts that are too long for Arrow's offsets: every rerun failed at the same place."""
    monkeypatch.setattr(sft, "PART_NUMBERS", 12)
    traces = [make_trace(name, ids, routed_experts=experts(range(6))) for ids, name in enumerate("stu")]  # 12 numbers
    export_sft([with_traces(trace.session_id, trace) for trace in traces], tmp_path / "out", Filters())
    parts = sorted((tmp_path / "out" / "parquet").iterdir())
    assert [len(pq.read_table(part)) for part in parts] == [1, 1, 1]


def test_an_episode_with_many_experts_is_written_in_row_groups(tmp_path, monkeypatch):
    """Guards against lists of a single episode that are too long for Arrow's offsets: a part has whole episodes."""
    monkeypatch.setattr("polar_gym.export.rows.MOST_NUMBERS", 24)
    traces = [make_trace("s", ids, routed_experts=experts(range(6))) for ids in range(3)]  # 12 numbers each
    export_sft([with_traces("s", *traces)], tmp_path / "out", Filters())
    (part,) = (tmp_path / "out" / "parquet").iterdir()
    assert row_groups(part) == [2, 1]


def test_the_same_ids_from_another_session_are_a_duplicate_also_in_a_later_run(tmp_path):
    out = tmp_path / "out"
    export_sft([graded_episode("s"), graded_episode("t")], out, Filters())
    entries = export_sft([graded_episode("u")], out, Filters())
    assert [entry.left_out for entry in entries] == [{}, {"duplicate": 1}, {"duplicate": 1}]
    assert len(rows(out, tmp_path / "cache")) == 1


def test_the_same_ids_with_another_mask_are_no_duplicate(tmp_path):
    other = make_trace("t", loss_mask=[1, 0, 0, 1], logprobs=[-0.5, 0.0, 0.0, -0.5])
    export_sft([graded_episode("s"), with_traces("t", other)], tmp_path / "out", Filters())
    assert len(rows(tmp_path / "out", tmp_path / "cache")) == 2


def test_what_a_killed_run_left_is_removed_and_done_again(tmp_path):
    """A part without its ledger is not committed."""
    out = tmp_path / "out"
    export_sft([graded_episode("s")], out, Filters())
    export_sft([with_traces("t", make_trace("t", 9))], out, Filters())
    (out / "ledger" / "00001.jsonl").unlink()
    (out / "parquet" / ".validation-00002.parquet.partial").write_bytes(b"half")
    assert len(rows(out, tmp_path / "first")) == 2, "what is there can be loaded all the same"
    export_sft([], out, Filters())
    assert {row["session_id"] for row in rows(out, tmp_path / "second")} == {"s"}
    assert not list(out.rglob("*.partial"))
    export_sft([with_traces("t", make_trace("t", 9))], out, Filters())
    assert {row["session_id"] for row in rows(out, tmp_path / "third")} == {"s", "t"}


def test_a_part_that_the_card_does_not_name_is_named_by_the_next_export(tmp_path, monkeypatch):
    """Guards against rows that `load_dataset` does not find, because the process was killed before the card."""
    out = tmp_path / "out"
    with monkeypatch.context() as killed:
        killed.setattr(SftDataset, "_write_card", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            export_sft([graded_episode("s")], out, Filters())
    assert not (out / "README.md").exists()
    export_sft([graded_episode("s")], out, Filters())
    assert {row["session_id"] for row in rows(out, tmp_path / "cache")} == {"s"}


KILLED = """
import os, sys
from pathlib import Path
from polar_gym.export import sft
from polar_gym.export.acceptance import Filters
from tests.unit.export.graded_episodes import make_trace, with_traces

sft.PART_EPISODES = 2

def episodes():
    for number in range(5):
        yield with_traces(f"s{number}", make_trace(f"s{number}", number))
    os.kill(os.getpid(), 9)

sft.export_sft(episodes(), Path(sys.argv[1]), Filters())
"""


def test_a_killed_run_leaves_a_usable_directory_and_the_next_goes_on(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], timeout=600, check=False)
    assert done.returncode == -9
    assert {row["session_id"] for row in rows(out, tmp_path / "first")} == {"s0", "s1", "s2", "s3"}
    every = [with_traces(f"s{number}", make_trace(f"s{number}", number)) for number in range(5)]
    assert len(export_sft(every, out, Filters())) == 5
    assert sorted(row["session_id"] for row in rows(out, tmp_path / "second")) == ["s0", "s1", "s2", "s3", "s4"]


def test_a_directory_has_one_set_of_filters(tmp_path):
    export_sft([graded_episode()], tmp_path / "out", Filters())
    with pytest.raises(ConfigError, match=r"was made with the filters .*another directory"):
        export_sft([graded_episode()], tmp_path / "out", Filters(min_reward=0.5))


def test_a_directory_of_an_earlier_version_is_named(tmp_path):
    """Guards against parts with different columns, which no reader takes together."""
    export_sft([graded_episode("s")], tmp_path, Filters())
    part = tmp_path / "parquet" / "train-00000.parquet"
    pq.write_table(pq.read_table(part).drop_columns("sampling"), part)
    with pytest.raises(ConfigError, match="an earlier version wrote other columns; export to a new directory"):
        export_sft([graded_episode("t")], tmp_path, Filters())


def test_damaged_filters_are_named(tmp_path):
    """Guards against a traceback."""
    export_sft([graded_episode()], tmp_path / "out", Filters())
    (tmp_path / "out" / "filters.json").write_text("{")
    with pytest.raises(ConfigError, match=r"filters\.json:1: not JSON"):
        export_sft([graded_episode()], tmp_path / "out", Filters())


def test_empty_filters_cost_no_example(tmp_path):
    """Guards against an export that removes all parts in silence: a machine that stopped may leave the file empty."""
    out = tmp_path / "out"
    export_sft([graded_episode()], out, Filters())
    (out / "filters.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"its filters\.json is empty; restore that file, or another directory"):
        export_sft([], out, Filters())
    assert len(rows(out, tmp_path / "cache")) == 1


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        export_sft([graded_episode()], tmp_path, Filters())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_exports_at_once_are_refused(tmp_path):
    def nested():
        yield graded_episode("s")
        export_sft([graded_episode("t")], tmp_path / "out", Filters())

    with pytest.raises(ConfigError, match="another export is writing there"):
        export_sft(nested(), tmp_path / "out", Filters())


def test_ids_are_stored_in_four_bytes(tmp_path):
    export_sft([graded_episode()], tmp_path / "out", Filters())
    (path,) = (tmp_path / "out" / "parquet").iterdir()
    column = pq.read_table(path).column("input_ids").combine_chunks()
    assert column.values.to_numpy().dtype == np.int32


# The command ----------------------------------------------------------------------------------------------------------


def export(*arguments: object) -> tuple[int, str]:
    console.width = 160  # whatever terminal the tests run in
    result = CliRunner().invoke(app, ["export", "sft", *map(str, arguments)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_the_command_counts_by_repository_and_says_how_to_accept_a_scripted_policy(tmp_path):
    file = tmp_path / "episodes.jsonl"
    scripted = graded_episode("a", engine=SCRIPTED)
    real = graded_episode("b")
    scripted.session.timing.running, real.session.timing.running = 2.0, 4.0
    file.write_bytes(b"".join(each.to_json() + b"\n" for each in (scripted, real)))
    code, said = export(file, "--out", tmp_path / "out")
    assert code == 0, said
    assert re.search(r"polar/intervals\W+2\W+1\W+50%\W+6\.0\W+2\.0\W+1\W+0\W+1 scripted", said)
    assert "train: 1 examples of 1 tasks" in said
    assert "1 episodes of a scripted policy were refused; --allow-scripted accepts them" in said


def test_the_command_names_a_file_that_is_not_there(tmp_path):
    code, said = export(tmp_path / "nothing.jsonl", "--out", tmp_path / "out")
    assert code != 0
    assert "nothing.jsonl: No such file or directory" in said
