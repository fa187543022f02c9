"""Rows of other data sets, made gradable. All rows are written by hand from the fields that the data sets document."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation.prepare import Override, Prepared, prepare, read_overrides
from polar_gym.curation.pytest_script import cases_of, eval_script, files_of_tests, patched_files
from polar_gym.curation.reverse import reversed_patch
from polar_gym.curation.swebench_specs import REQUIREMENT
from polar_gym.evaluators.swebench_report import known_parsers
from polar_gym.paths import cache_dir
from polar_gym.tasks.rows import Selection, load_tasks
from polar_gym.workspaces.venv import ensure_venv

SECTION = """\
diff --git a/{path} b/{path}
--- a/{path}
+++ b/{path}
@@ -1 +1,2 @@
 x
+y
"""


def row(instance_id: str, repo: str, version: str, path: str, tests: list[str]) -> dict:
    return {
        "instance_id": instance_id,
        "repo": repo,
        "version": version,
        "base_commit": "0123456789" * 4,
        "problem_statement": "It breaks.",
        "patch": SECTION.format(path="a.py"),
        "test_patch": SECTION.format(path=path) + SECTION.format(path="tests/data.json"),
        "FAIL_TO_PASS": json.dumps(tests),
        "PASS_TO_PASS": "[]",
    }


DJANGO = row("django__django-11099", "django/django", "3.0", "tests/auth_tests/test_validators.py", ["a (b.C)"])
SYMPY = row("sympy__sympy-20590", "sympy/sympy", "1.7", "sympy/core/tests/test_basic.py", ["test_immutable"])
FLASK = row("pallets__flask-5014", "pallets/flask", "2.3", "tests/test_blueprints.py", ["tests/test_blueprints.py::a"])
MOTO = row("getmoto__moto-5752", "getmoto/moto", "4.1", "tests/test_ssm/test_ssm.py", ["tests/test_ssm/test_ssm.py::a"])
MYPY = {
    **row(
        "python__mypy-10392", "python/mypy", "0.820", "test-data/unit/check.test", ["mypy/test/testcheck.py::S::testA"]
    ),
    "test_patch": SECTION.format(path="test-data/unit/check.test") + "+[case testA]\n+[case testB]\n",
}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "patch": SECTION.format(path="oauthlib/a.py"),
    "problem_statement": "It breaks.",
    "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
    "PASS_TO_PASS": ["tests/test_a.py::test_c", "tests/test_z.py::test_d"],
}


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def made(tmp_path: Path, *rows: dict, **overrides: Override) -> Prepared:
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    return prepare(path, "auto", {name.replace("__", "/"): one for name, one in overrides.items()}, cache_dir())


# SWE-bench ------------------------------------------------------------------------------------------------------------


def test_rows_of_swe_bench_get_what_swebench_4_itself_says(tmp_path):
    """Held against its own answer, asked for another way: its script is built from the commands alone, as its whole
    specification would download the requirements of the repository."""
    program = """
import json, sys
from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
from swebench.harness.test_spec.create_scripts import make_eval_script_list
rows = json.load(sys.stdin)
specs = [MAP_REPO_VERSION_TO_SPECS[row["repo"]][row["version"]] for row in rows]
lists = [make_eval_script_list(row, spec, "testbed", "/testbed", row["base_commit"], row["test_patch"])
         for row, spec in zip(rows, specs)]
print(json.dumps(["\\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\\n" for lines in lists]))
"""
    rows = [DJANGO, SYMPY, FLASK]
    python = ensure_venv([REQUIREMENT], cache_dir()) / "bin" / "python"
    said = subprocess.run([python, "-c", program], input=json.dumps(rows), capture_output=True, text=True, check=True)
    prepared = made(tmp_path, *rows)
    assert prepared.problems == []
    assert [each["eval_script"] for each in prepared.rows] == json.loads(said.stdout)
    parsers = [each["log_parser"] for each in prepared.rows]
    assert parsers == ["parse_log_django", "parse_log_sympy", "parse_log_pytest"]
    assert prepared.rows[0]["image"] == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (
        "runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 auth_tests.test_validators\n"
        in (prepared.rows[0]["eval_script"])
    )


def test_what_swebench_4_does_not_know_names_the_row_the_field_and_the_way_out(tmp_path):
    unknown, old = {**FLASK, "repo": "a/b"}, {**FLASK, "version": "0.1"}
    nothing = {name: value for name, value in FLASK.items() if name != "base_commit"}
    prepared = made(tmp_path, unknown, FLASK, old, nothing)
    assert [each["repo"] for each in prepared.rows] == ["pallets/flask"]
    for problem, start in zip(
        prepared.problems,
        (
            "rows.jsonl:1: repo: swebench 4 does not know 'a/b'",
            "rows.jsonl:3: version: ",
            "rows.jsonl:4: base_commit: ",
        ),
        strict=True,
    ):
        assert start in problem
    assert "--overrides" in prepared.problems[0]


# SWE-Gym --------------------------------------------------------------------------------------------------------------


def test_rows_of_swe_gym_run_the_files_of_the_test_patch(tmp_path):
    (found,) = made(tmp_path, MOTO).rows
    assert "\npytest -n0 -rA --color=no tests/test_ssm/test_ssm.py\n" in found["eval_script"]
    assert MOTO["test_patch"] in found["eval_script"]
    assert (found["image"], found["workspace_path"], found["log_parser"]) == (
        "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest",
        "/testbed",
        "parse_log_pytest",
    )


def test_mypys_cases_are_chosen_by_name(tmp_path):
    (found,) = made(tmp_path, MYPY).rows
    assert "\npytest -n0 -rA --color=no -k 'testA or testB'\n" in found["eval_script"]


def test_a_parquet_file_may_have_the_row_within_a_row(tmp_path):
    """As SkyRL-v0-293-data has it."""
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "instance": MOTO}]), path)
    (found,) = prepare(path, "auto", {}, cache_dir()).rows
    assert found["instance_id"] == "getmoto__moto-5752"


# SWE-smith ------------------------------------------------------------------------------------------------------------


def test_rows_of_swe_smith_are_turned_round(tmp_path):
    (found,) = made(tmp_path, SMITH).rows
    assert found["base_patch"] == SMITH["patch"]
    assert found["patch"].splitlines()[-3:] == ["@@ -1,2 +1 @@", " x", "-y"]
    assert found["hidden_files"] == ["tests/test_a.py"]
    assert found["PASS_TO_PASS"] == ["tests/test_a.py::test_c"]
    assert "\npytest -rA --color=no tests/test_a.py\n" in found["eval_script"]
    assert "image" not in found


def test_what_cannot_be_turned_round_or_run_is_named(tmp_path):
    binary = {**SMITH, "patch": "diff --git a/x.png b/x.png\nGIT binary patch\nliteral 0\n"}
    unittests = {**SMITH, "FAIL_TO_PASS": ["test_a (tests.A)"]}
    no_image = {**SMITH, "image_name": None}
    prepared = made(tmp_path, binary, unittests, no_image)
    assert prepared.rows == []
    for problem, start in zip(prepared.problems, ("1: patch: ", "2: test_patch, FAIL_TO_PASS: ", "3: "), strict=True):
        assert f"rows.jsonl:{start}" in problem
    assert "--overrides" in prepared.problems[1]


def test_pydantics_runner_is_in_the_home_of_root(tmp_path):
    """Its rows were graded 0: the environment that pytest was looked for in is empty."""
    pydantic = {**SMITH, "repo": "swesmith/pydantic__pydantic.acb0f10f"}
    (problem,) = made(tmp_path, pydantic).problems
    assert "rows.jsonl:1: eval_script: names /root/.local/bin/uv, which the user of a sandbox cannot read" in problem
    assert made(tmp_path, pydantic, pydantic__pydantic=Override(test_command="uv run pytest {files}")).problems == []


# All ------------------------------------------------------------------------------------------------------------------


def test_an_override_says_how_a_repositorys_tests_run(tmp_path):
    path = tmp_path / "overrides.yaml"
    path.write_text("oauthlib/oauthlib: {test_command: 'tox -q', log_parser: unittest}\n")
    (found,) = prepare(jsonl(tmp_path / "rows.jsonl", SMITH), "auto", read_overrides(path), cache_dir()).rows
    assert "\ntox -q\n" in found["eval_script"]
    assert found["log_parser"] == "unittest"
    path.write_text("oauthlib/oauthlib: {command: tox}\n")
    with pytest.raises(ValueError, match=r"overrides\.yaml: oauthlib/oauthlib\.test_command: Field required"):
        read_overrides(path)


@pytest.mark.parametrize("field", ["eval_script", "test_command"])
def test_an_override_wins_over_what_a_row_says_itself(tmp_path, field):
    """The error of a row whose tests need the home of root tells people to write an override."""
    said = {"eval_script": eval_script("/root/run", ""), "test_command": "/root/run"}
    row = {**FLASK, "test_patch": "", "image": "some/image", "workspace_path": "/app", field: said[field]}
    assert "names /root/run" in made(tmp_path, row).problems[0]
    prepared = made(tmp_path, row, pallets__flask=Override(test_command="run {files}", log_parser="tap"))
    assert prepared.problems == []
    (found,) = load_tasks(jsonl(tmp_path / "out.jsonl", *prepared.rows), Selection())
    assert (found.image, found.workspace_path, found.log_parser) == ("some/image", "/app", "tap")
    assert "run tests/test_blueprints.py" in getattr(found, field).splitlines()
    assert "/root" not in getattr(found, field)
    assert found.eval_script == "" or "\ncd /app\n" in found.eval_script


def test_an_override_of_a_prepared_row_leaves_its_planted_bug(tmp_path):
    (first,) = made(tmp_path, SMITH).rows
    (second,) = made(tmp_path, first, oauthlib__oauthlib=Override(test_command="tox {files}")).rows
    assert "\ntox tests/test_a.py\n" in second["eval_script"]
    assert {**second, "eval_script": first["eval_script"], "log_parser": first["log_parser"]} == first


def test_an_override_of_no_row_is_an_error(tmp_path):
    path, overrides = jsonl(tmp_path / "rows.jsonl", SMITH, MOTO), tmp_path / "overrides.yaml"
    overrides.write_text("oauthlib/oautlib: {test_command: tox}\n")
    command = ["tasks", "prepare", str(path), "--out", str(tmp_path / "out.jsonl"), "--overrides", str(overrides)]
    refused = CliRunner().invoke(app, command)
    assert str(refused.exception) == (
        f"--overrides: oauthlib/oautlib: no row of {path} is of this repository; correct the name or remove it; "
        "the rows are of getmoto/moto, oauthlib/oauthlib"
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_prepared_rows_stay_as_they_are_and_load(tmp_path):
    first = made(tmp_path, MOTO, SMITH)
    out = jsonl(tmp_path / "out.jsonl", *first.rows)
    assert prepare(out, "auto", {}, cache_dir()).rows == first.rows
    assert [task.instance_id for task in load_tasks(out, Selection())] == [MOTO["instance_id"], SMITH["instance_id"]]


def test_the_command_writes_all_or_nothing_unless_it_may_skip(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", MOTO, {**SMITH, "patch": "?"})
    command = ["tasks", "prepare", str(path), "--out", str(tmp_path / "out.jsonl"), "--image", "mirror/{gym_id}"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code != 0
    assert not (tmp_path / "out.jsonl").exists()
    done = CliRunner().invoke(app, [*command, "--skip"])
    assert done.exit_code == 0, done.output
    (task,) = load_tasks(tmp_path / "out.jsonl", Selection())
    assert task.image == "mirror/getmoto_s_moto-5752"


def test_other_names_of_swebenchs_parsers_are_known():
    """Rows of SWE-bench may name a parser by its repository: `parse_log_flask` is `parse_log_pytest`."""
    assert {"parse_log_flask", "parse_log_astropy", "parse_log_pytest"} <= known_parsers()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("go test -v ./...", "'go test' needs /root/go"),
        ("cd a && ./mvnw -q test", "'./mvnw' needs /root/.m2"),
        ("timeout 9 mvnd test", "'mvnd' needs /root/.m2"),
        ("./gradlew test", "'./gradlew' needs /root/.gradle"),
        ("PATH=/root/.cargo/bin:$PATH cargo test", "names /root/.cargo/bin"),
        ("GOMODCACHE=/go/pkg/mod go test ./...", None),
        ("mvn -Dmaven.repo.local=/m2 test", None),
        ("pytest tests/gradle/test_mvn.py /testbed/root/a", None),
    ],
)
def test_what_tests_need_of_roots_home_is_named(tmp_path, command: str, problem: str | None):
    """Sandboxes run as another user: such tests grade 0 or are masked."""
    said = made(tmp_path, {**FLASK, "test_command": command, "image": "some/image"}).problems
    assert [f"rows.jsonl:1: test_command: {problem}, which the user" in each for each in said] == [True] * bool(problem)


def test_what_only_the_test_patch_says_of_roots_home_is_data(tmp_path):
    patch = SECTION.format(path="a_test.go") + "+/root/x go test ./...\n"
    row = {**FLASK, "test_patch": patch, "eval_script": eval_script("pytest", patch), "image": "some/image"}
    assert made(tmp_path, row).problems == []


# Parts ----------------------------------------------------------------------------------------------------------------


def test_a_patch_that_holds_the_scripts_own_delimiter_does_not_end_it():
    script = eval_script("pytest", "+END_OF_TEST_PATCH\n")
    assert "<<'END_OF_TEST_PATCH_'\n+END_OF_TEST_PATCH\nEND_OF_TEST_PATCH_\n" in script


def test_files_and_cases():
    removed = "diff --git a/t/old.py b/t/old.py\n--- a/t/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert patched_files(SECTION.format(path="t/test a.py") + removed + SECTION.format(path="d.yml")) == ["t/test a.py"]
    assert files_of_tests(["b.py::A::c[x::y]", "a.py::t", "b.py::d", "no", "n.test::x"]) == ["a.py", "b.py"]
    assert cases_of("", ["a.py::S::f.test::testX"]) == ["testX"]


CONTENT = st.none() | st.tuples(
    st.lists(st.sampled_from(["", "a", "-- x", "++ y", "@@ -1 +1 @@", "diff --git a/x b/x", "é\r"]), max_size=8),
    st.booleans(),
).map(lambda drawn: "\n".join(drawn[0]) + ("\n" if drawn[1] else ""))


@settings(deadline=None, max_examples=25)
@given(old=st.tuples(CONTENT, CONTENT), new=st.tuples(CONTENT, CONTENT), executable=st.booleans())
def test_a_patch_turned_round_undoes_it(tmp_path_factory, old, new, executable):
    """Files that appear, vanish, change, lose their last newline, change their mode or are renamed."""
    repository = tmp_path_factory.mktemp("repository")

    def git(*arguments: str, stdin: str = "") -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false", *arguments]
        done = subprocess.run(command, cwd=repository, input=stdin.encode(), capture_output=True, check=True)
        return done.stdout.decode()

    def put(contents: tuple[str | None, str | None]) -> None:
        for name, text in zip(("one.txt", "twö \t.txt"), contents, strict=True):
            (repository / name).unlink(missing_ok=True)
            if text is not None:
                (repository / name).write_bytes(text.encode())

    git("init", "-q")
    put(old)
    git("add", "-A")
    git("commit", "-qm", "old", "--allow-empty")
    put(new)
    if executable and new[0] is not None:
        (repository / "one.txt").chmod(0o755)
    git("add", "-A")
    patch = git("diff", "--cached", "-M")
    if patch:
        git("apply", "--index", "--whitespace=nowarn", stdin=reversed_patch(patch))
        assert git("diff", "--cached", "HEAD") == ""
        assert reversed_patch(reversed_patch(patch)).split("\n@@")[0] == patch.split("\n@@")[0]
