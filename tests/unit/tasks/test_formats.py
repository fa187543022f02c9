"""Data sets in the forms of SWE-bench, SWE-bench Verified, SWE-Gym and SWE-smith, from JSONL, Parquet and a hub."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from polar_gym.schema import PluginSpec, RuntimeSpec, Workspace
from polar_gym.tasks import TASK_SOURCES, Task
from polar_gym.tasks.request import UngradableError
from tests.support.task_files import request_for

DOCKER = RuntimeSpec(name="docker")
CORE = {
    "repo": "pallets/flask",
    "base_commit": "0" * 40,
    "problem_statement": "It breaks.",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": "",
    "hints_text": "",
    "created_at": "2024-01-01T00:00:00Z",
    "version": "2.3",
}
VERIFIED = {
    **CORE,
    "instance_id": "pallets__flask-5014",
    "difficulty": "<15 min fix",
    "FAIL_TO_PASS": '["tests/test_a.py::test_b"]',
    "PASS_TO_PASS": '["tests/test_a.py::test_c"]',
}
SWE_BENCH_5 = {
    **VERIFIED,
    "image": "bench/flask-5014",
    "eval_script": "echo '>>>>> Start Test Output'; pytest; echo '>>>>> End Test Output'",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
SWE_GYM = {
    **CORE,
    "instance_id": "getmoto__moto-5752",
    "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
    "PASS_TO_PASS": [],
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "image_name": "smith/oauthlib",
    "patch": "diff --git a/a.py b/a.py\n",
    "problem_statement": "It breaks.",
    "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
    "PASS_TO_PASS": ["tests/test_a.py::test_c"],
}


def load(name: str, **options: object) -> list[Task]:
    spec = PluginSpec.model_validate({"name": name, **options})
    return TASK_SOURCES.get(name)(TASK_SOURCES.options(spec)).load()


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: dict) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_of_every_form_load_from_both_kinds_of_file(tmp_path, write):
    """One file each: Parquet has one schema a file, so rows of several forms come with nulls."""
    suffix = write.__name__
    for row, image in (
        (VERIFIED, "hub/sweb.eval.x86_64.pallets_1776_flask-5014:latest"),
        (SWE_BENCH_5, "bench/flask-5014"),
        (SWE_GYM, "hub/sweb.eval.x86_64.getmoto_1776_moto-5752:latest"),
        (SWE_SMITH, "smith/oauthlib"),
    ):
        path = write(tmp_path / f"tasks.{suffix}", {"eval_script": "pytest", **row})
        (task,) = load(suffix, path=path, image="hub/sweb.eval.x86_64.{docker_id}:latest")
        assert task.instance_id == row["instance_id"]
        assert task.FAIL_TO_PASS == ["tests/test_a.py::test_b"]
        assert task.image == image
        assert request_for(task, runtime=DOCKER).runtime.image == image


def test_nulls_that_parquet_puts_where_rows_differ_are_nothing(tmp_path):
    lists = {name: json.dumps(SWE_SMITH[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    nulls = dict.fromkeys(SWE_BENCH_5)
    path = parquet(tmp_path / "tasks.parquet", {**nulls, **SWE_SMITH, **lists}, SWE_BENCH_5)
    smith, bench = load("parquet", path=path)
    assert smith.eval_script == smith.version == ""
    assert bench.eval_script == SWE_BENCH_5["eval_script"]


def test_what_swebench_needs_to_grade_reaches_the_evaluator(tmp_path):
    (task,) = load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", SWE_BENCH_5))
    options = request_for(task, runtime=DOCKER).evaluator.options
    assert options["eval_script"] == SWE_BENCH_5["eval_script"]
    assert (options["log_parser"], options["repo"], options["version"]) == ("parse_log_pytest", "pallets/flask", "2.3")
    assert "test_command" not in options


def test_rows_of_our_own_need_neither_repository_nor_version_to_be_graded(tmp_path):
    row = {**SWE_SMITH, "test_command": "pytest"}
    (task,) = load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", row))
    assert set(request_for(task, runtime=DOCKER).evaluator.options) == {
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "test_command",
        "log_parser",
    }


@pytest.mark.parametrize("row", [VERIFIED, SWE_GYM, SWE_SMITH])
def test_a_row_that_cannot_be_graded_says_where_it_is_and_what_prepares_it(tmp_path, row):
    (task,) = load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", row), image="x:{docker_id}")
    wrong = r"tasks\.jsonl:1: test_command, eval_script: .*has neither.*polar-gym tasks prepare FILE --out FILE"
    with pytest.raises(UngradableError, match=wrong):
        request_for(task, runtime=DOCKER)


def test_a_planted_bug_and_hidden_files_reach_the_workspace_and_are_for_images_only(tmp_path):
    row = {**SWE_BENCH_5, "base_patch": "x", "hidden_files": ["tests/test_a.py"], "workspace_path": "/testbed"}
    (task,) = load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", row))
    workspace = request_for(task, runtime=DOCKER).runtime.workspace
    assert (workspace.path, workspace.base_patch, workspace.hidden_files) == ("/testbed", "x", ["tests/test_a.py"])
    with pytest.raises(ValueError, match=r"tasks\.jsonl:1: base_patch, hidden_files: are for images"):
        load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", {**row, "workspace": "."}))
    with pytest.raises(ValidationError, match="are for an image's repository"):
        Workspace(source=".", base_patch="x")


def test_a_row_without_an_image_says_how_to_name_one(tmp_path):
    with pytest.raises(ValueError, match=r"tasks\.jsonl:1: workspace, image: .*tasks\.image='.*\{docker_id\}"):
        load("jsonl", path=jsonl(tmp_path / "tasks.jsonl", VERIFIED))


def test_an_error_names_file_line_field_value_and_fix(tmp_path):
    path = parquet(
        tmp_path / "tasks.parquet", SWE_BENCH_5, {**SWE_BENCH_5, "instance_id": "b", "PASS_TO_PASS": "[oops"}
    )
    with pytest.raises(ValueError, match=r"tasks\.parquet:2: PASS_TO_PASS: not the JSON text of a list: .*'\[oops'"):
        load("parquet", path=path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"not parquet", "not a Parquet file"), (None, "cannot read the task file")]
)
def test_a_file_that_is_no_parquet_is_named(tmp_path, content, message):
    path = tmp_path / "tasks.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"tasks\.parquet: {message}"):
        load("parquet", path=path)


@pytest.mark.parametrize("image", ["x:{commit}", "x:{", "x:{0}"])
def test_an_image_template_with_an_unknown_name_is_refused(image):
    with pytest.raises(ValueError, match=r"may hold \{instance_id\}, \{docker_id\} and \{gym_id\}"):
        load("jsonl", path="x.jsonl", image=image)


def test_a_data_set_of_a_local_directory_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "data"
    directory.mkdir()
    parquet(directory / "test-00000-of-00001.parquet", SWE_BENCH_5)
    (task,) = load("huggingface", dataset=str(directory))
    assert (task.instance_id, task.FAIL_TO_PASS) == ("pallets__flask-5014", ["tests/test_a.py::test_b"])
    with pytest.raises(ValueError, match=r"split 'dev'.*without a hub, download the data set's Parquet"):
        load("huggingface", dataset=str(directory), split="dev")


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"pip install .*; or download the data set.s Parquet file and set tasks=parquet"
    ):
        load("huggingface", dataset="somebody/something")
