"""Rows in NeMo Gym's form as tasks."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.evaluators.nemo_gym import NemoGymOptions
from polar_gym.gateway.node.assemble import load_tasks, make_request
from polar_gym.schema import EvaluatorSpec
from polar_gym.tasks.request import UngradableError, instruction, with_task
from tests.support.resources_server import row
from tests.support.task_files import ROW, load, request_for, write

OWN = "tests.e2e.broken_harness:CRASHING"
GRADING = {"name": "nemo_gym", "url": "http://127.0.0.1:1"}


def rows_of(given: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given}}


def test_a_row_is_a_task_without_a_repository(tmp_path: Path) -> None:
    one, other = load("jsonl", path=write(tmp_path, row(6), row(7, instance_id="seven")))
    assert (one.instance_id[:4], other.instance_id) == ("gym-", "seven")
    assert one.instance_id == load("jsonl", path=write(tmp_path, row(6)))[0].instance_id
    request = request_for(one, evaluator=EvaluatorSpec.model_validate(GRADING))
    assert request.instruction == "Count up to 6."
    assert (request.runtime.workspace.source, request.runtime.image) == (None, None)
    assert request.evaluator.options["row"] == row(6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Do it.", "Do it."),
        (
            [
                {"role": "user", "content": [{"type": "input_text", "text": "One."}]},
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Two."},
            ],
            "Be kind.\n\nOne.\n\nTwo.",
        ),
    ],
    ids=["text", "messages"],
)
def test_the_instruction_is_made_of_the_messages(tmp_path: Path, given: Any, said: str) -> None:
    (task,) = load("jsonl", path=write(tmp_path, rows_of(given)))
    assert instruction(task) == said


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"responses_create_params": None}, "responses_create_params.input: expected"),
        (rows_of(7), "responses_create_params.input: expected"),
        (rows_of([{"role": "assistant", "content": "x"}]), r"input\[0\].*begin in mid-conversation"),
        (rows_of([{"type": "function_call_output", "output": "x"}]), "mid-conversation"),
        (rows_of([{"role": "user", "content": [{"type": "input_image"}]}]), r"input\[0\]\.content: expected text"),
        (rows_of([]), "problem_statement: must not be empty"),
        ({**rows_of("x"), "image": "/etc/shadow.sif"}, "image"),
    ],
    ids=str,
)
def test_a_bad_row_is_refused_by_its_line_and_field(tmp_path: Path, bad: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"tasks\.jsonl:2: .*{said}"):
        load("jsonl", path=write(tmp_path, row(6), bad))


def test_a_number_that_no_file_of_episodes_holds_is_refused(tmp_path: Path) -> None:
    """Guards against a rollout that ends at one row, without its name: an answer of 2**100 is valid JSON."""
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: .*64-bit range; correct it"):
        load("jsonl", path=write(tmp_path, row(6), {**row(7), "expected_answer": 2**100}))


def test_tools_have_no_nulls_of_other_rows(tmp_path: Path) -> None:
    """Guards against schemas that MCP clients may refuse: Arrow gives a tool the properties of all others, as
    nulls."""
    given = [
        {"type": "object", "properties": {"count": {"type": "integer", "enum": [1, None]}}, "required": ["count"]},
        {"type": "object", "properties": {"name": {"type": "string"}}},
    ]
    tools = [{"type": "function", "name": "tool", "parameters": schema} for schema in given]
    rows = [{"responses_create_params": {"input": "Go.", "tools": [tool]}} for tool in tools]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    tasks = load("parquet", path=tmp_path / "tasks.parquet")
    assert tasks[1].gym_row["responses_create_params"]["tools"][0]["parameters"]["properties"]["count"] is None
    options = [NemoGymOptions(url=GRADING["url"], row=task.gym_row) for task in tasks]
    assert [each.tools[0]["inputSchema"] for each in options] == given


def test_a_column_that_json_has_no_form_for_is_named(tmp_path: Path) -> None:
    """Guards against a traceback at a column of dates."""
    rows = [{"responses_create_params": {"input": "Go."}, "when": datetime(2026, 1, 1)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    with pytest.raises(ValueError, match=r"tasks\.parquet:1: .*datetime.*; write the columns of such values as text"):
        load("parquet", path=tmp_path / "tasks.parquet")


def test_other_evaluators_and_rows_do_not_fit(tmp_path: Path) -> None:
    (task,) = load("jsonl", path=write(tmp_path, row(6)))
    with pytest.raises(UngradableError, match=r"tasks\.jsonl:1"):
        request_for(task)
    (repository,) = load("jsonl", path=write(tmp_path, ROW))
    with pytest.raises(UngradableError, match="nemo_gym grades rows in NeMo Gym's form"):
        with_task(request_for(repository, evaluator=EvaluatorSpec.model_validate(GRADING)), repository)


@pytest.mark.parametrize("harness", [OWN, "mini_swe_agent", "mistral_vibe"])
def test_a_harness_without_mcp_is_refused_where_there_are_tools(tmp_path: Path, harness: str) -> None:
    without = {**row(7), "responses_create_params": {"input": "Count."}}
    tasks = {"name": "jsonl", "path": str(write(tmp_path, row(6), without))}
    config = load_config(settings={"tasks": tasks, "harness": {"name": harness}, "evaluator": GRADING})
    first, second = load_tasks(config)
    said = rf"agent\.name='{harness}': .* [0-9]+ tools that evaluator\.name='nemo_gym' offers; use claude_code, codex, "
    with pytest.raises(ConfigError, match=said):
        make_request(config, first)
    make_request(config, second)
