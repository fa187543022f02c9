"""Adds the way of grading to rows of published data sets.

A row of SWE-bench (before swebench 5), SWE-Gym or SWE-smith leaves its grading to the program that it was published
with. That program's knowledge is put into the row once, so that a run needs neither the program nor a network:

- SWE-bench and SWE-bench Verified: swebench 4's specification of the row (`swebench_specs`).
- SWE-Gym, and SkyRL-v0-293-data, which has the row under `instance`
  (https://huggingface.co/datasets/SWE-Gym/SWE-Gym): pytest on the files of the test patch, with the options that
  https://github.com/SWE-Gym/SWE-Bench-Fork (`swebench/harness/constants.py`) has for the repository. Images are
  `xingyaoww/sweb.eval.x86_64.OWNER_s_NAME-NUMBER` (https://github.com/SWE-Gym/OpenHands, `evaluation/swe_bench`).
- SWE-smith (https://huggingface.co/datasets/SWE-bench/SWE-smith; https://github.com/SWE-bench/SWE-smith,
  `swesmith/harness`): `patch` plants the bug into the image's repository. The row's `patch` becomes `base_patch`, and
  its reverse becomes `patch`. The tests are those of the files that FAIL_TO_PASS names. These files are hidden from the
  harness. Tests of other files do not count, as in `swesmith.harness.grading`.

`overrides` says, for a repository, how its tests run where the above does not hold, or a row says something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from polar_gym.curation.pytest_script import (
    WORKSPACE,
    cases_of,
    eval_script,
    files_of_tests,
    filled_in,
    patched_files,
)
from polar_gym.curation.reverse import reversed_patch
from polar_gym.curation.swebench_specs import FIELDS, specifications
from polar_gym.errors import in_one_line
from polar_gym.evaluators.swe import SweOptions
from polar_gym.registry import Options
from polar_gym.tasks import Task
from polar_gym.tasks.request import swe_options
from polar_gym.tasks.rows import (
    IMAGE_NAMES,
    FileSelection,
    Form,
    PlacedRow,
    derived_image,
    read_rows,
    test_ids,
    to_task,
)

Row = dict[str, Any]

_PLACE: Row = {"workspace_path": WORKSPACE}


class Override(Options):
    """The way in which the tests of one repository run."""

    test_command: str
    """The command, in the image's environment. `{files}`: the test files; `{cases}`: `'case or case'`."""
    log_parser: str = "pytest"


Overrides = dict[str, Override]
"""By repository, `owner/name`."""


def _gym(command: str, log_parser: str = "parse_log_pytest") -> Override:
    """Return an override for SWE-Gym. swebench's parser wrote SWE-Gym's test ids, cut at the first blank."""
    return Override(test_command=command, log_parser=log_parser)


_ONE_PROCESS = _gym("pytest -n0 -rA --color=no {files}")
"""For repositories whose configuration has pytest run in several processes."""
_SWE_GYM = {
    **dict.fromkeys(("bokeh/bokeh", "dask/dask", "getmoto/moto", "modin-project/modin"), _ONE_PROCESS),
    "conan-io/conan": _gym("python -m pytest -n0 -rA --color=no {files}"),
    "pydantic/pydantic": _gym(
        "pytest -rA -vv --color=no -o console_output_style=classic {files}", "parse_log_pytest_v2"
    ),
    "python/mypy": _gym("pytest -n0 -rA --color=no -k {cases}"),
    **dict.fromkeys(
        ("Project-MONAI/MONAI", "facebookresearch/hydra", "iterative/dvc", "pandas-dev/pandas"),
        _gym("pytest -rA --color=no {files}"),
    ),
}
_SWE_SMITH = {"pydantic/pydantic": Override(test_command="/root/.local/bin/uv run pytest -rA --color=no {files}")}
_SWE_SMITH_ELSE = Override(test_command="pytest -rA --color=no {files}")
_IMAGES: dict[Form, str] = {
    "swe_bench": "swebench/sweb.eval.x86_64.{docker_id}:latest",
    "swe_gym": "xingyaoww/sweb.eval.x86_64.{gym_id}:latest",
}
_OF_ROOT: dict[str, tuple[str, list[str]]] = {
    r"go (?:build|run|test|vet)": ("/root/go", ["GOMODCACHE", "GOPATH", "-mod=vendor"]),
    r"mvnd?|(?:\./)?mvnw": ("/root/.m2", ["-Dmaven.repo.local"]),
    r"(?:\./)?gradlew?": ("/root/.gradle", ["GRADLE_USER_HOME", "--gradle-user-home"]),
}
"""Commands, as a pattern -> what they need that an image has in the home of root, and settings that name another place
for that."""
_SHOWN = 20
"""How many names of repositories an error tells."""
_NOT_READ = "which the user of a sandbox cannot read"
_OVERRIDE = "say how its tests run in the file of --overrides, as `OWNER/NAME: {test_command: ..., log_parser: ...}`"


@dataclass(slots=True)
class Prepared:
    rows: list[Row] = field(default_factory=list)
    """The rows that say how they are graded, in the order of the file."""
    problems: list[str] = field(default_factory=list)
    """A message for each other row: file, line, field, problem, and fix."""


def read_overrides(path: Path) -> Overrides:
    """Read overrides from a YAML file. Raises `ValueError` that names the file and the key."""
    try:
        return TypeAdapter(Overrides).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot read the overrides: {error}") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {in_one_line(error)}") from error


def prepare(path: Path, form: Form, overrides: Overrides, cache: Path, image: str | None = None) -> Prepared:
    """Prepare the rows of a file.

    `image` (in the form of `FileSelection.image`) replaces the images that the data sets were published with. Blocks.
    Raises `ValueError` where the file cannot be read or an override is of no row, `CurationError` where swebench 4
    cannot be installed.
    """
    placed = [
        (place, row["instance"] if isinstance(row.get("instance"), dict) else row) for place, row in read_rows(path)
    ]
    _check_used(overrides, path, sorted({repository(row) for _, row in placed}))
    known = _specifications(placed, form, overrides, cache)
    prepared = Prepared()
    for place, row in placed:
        try:
            override = overrides.get(repository(row))
            if _says(row):
                made = _said_otherwise(place, row, override) if override else row
            else:
                made = _made(place, row, _form(row, form), override, known.get(place))
            if image:
                made = {**made, "image": derived_image(image, str(made.get("instance_id", "")))}
            _check(place, made, path.parent)
            prepared.rows.append(made)
        except ValueError as error:
            prepared.problems.append(str(error))
    return prepared


def repository(row: Row) -> str:
    """Return a row's repository as `owner/name`; SWE-smith writes `swesmith/owner__name.commit`."""
    repo = str(row.get("repo") or "")
    if repo.startswith("swesmith/"):
        return repo.removeprefix("swesmith/").rpartition(".")[0].replace("__", "/", 1)
    return repo


def _form(row: Row, form: Form) -> Form:
    if form != "auto":
        return form
    if str(row.get("repo") or "").startswith("swesmith/"):
        return "swe_smith"
    return "swe_gym" if row.get("repo") in _SWE_GYM else "swe_bench"


def _says(row: Row) -> bool:
    """Return whether the row says how its tests run, as rows of swebench 5 do."""
    return bool(row.get("eval_script") or row.get("test_command"))


def _specifications(
    placed: list[PlacedRow], form: Form, overrides: Overrides, cache: Path
) -> dict[str, dict[str, str]]:
    """Return place -> swebench 4's specification, for the rows that need one.

    All rows are asked about at once, because asking takes seconds.
    """
    asked = [
        (place, row)
        for place, row in placed
        if _form(row, form) == "swe_bench"
        and not _says(row)
        and repository(row) not in overrides
        and all(isinstance(row.get(name), str) for name in FIELDS)
    ]
    return dict(zip([place for place, _ in asked], specifications([row for _, row in asked], cache), strict=True))


def _check_used(overrides: Overrides, path: Path, repositories: list[str]) -> None:
    """Raise `ValueError` that names the overrides of which no row is: a misspelt name has no effect."""
    if unused := sorted(overrides.keys() - set(repositories)):
        raise ValueError(
            f"--overrides: {', '.join(unused)}: no row of {path} is of this repository; correct the name or remove it; "
            f"the rows are of {', '.join(repositories[:_SHOWN]) or 'none'}"
        )


def _said_otherwise(place: str, row: Row, override: Override) -> Row:
    """Return a row that says how its tests run, with the override's way in the same field."""
    patch = str(row.get("test_patch") or "")
    tests = test_ids(place, "FAIL_TO_PASS", row.get("FAIL_TO_PASS"))
    command = _command(place, override, patched_files(patch) or files_of_tests(tests), cases_of(patch, tests))
    script = _script(command, patch, override, str(row.get("workspace_path") or WORKSPACE))
    if not row.get("eval_script"):
        script = {**script, "eval_script": "", "test_command": command}
    return {**row, **script}


def _made(place: str, row: Row, form: Form, override: Override | None, specification: dict[str, str] | None) -> Row:
    """Return the row with its grading added. Raises `ValueError` that names the place and the field."""
    if form == "swe_smith":
        return _swe_smith(place, row, override or _SWE_SMITH.get(repository(row), _SWE_SMITH_ELSE))
    if override is not None or form == "swe_gym":
        override = override or _SWE_GYM.get(repository(row))
        if override is None:
            raise ValueError(f"{place}: repo: {row.get('repo')!r} is none of SWE-Gym's; {_OVERRIDE}")
        return _patched_tests(place, row, form, override)
    if specification is None:
        wrong = next(name for name in FIELDS if not isinstance(row.get(name), str))
        raise ValueError(f"{place}: {wrong}: expected a text, got {row.get(wrong)!r}; swebench 4 needs it")
    if "problem" in specification:
        raise ValueError(f"{place}: {specification['field']}: {specification['problem']}; {_OVERRIDE}")
    known = {name: value for name, value in specification.items() if name != "image"}
    return {**row, **known, **_image(row, specification["image"]), **_PLACE}


def _patched_tests(place: str, row: Row, form: Form, override: Override) -> Row:
    """Prepare a row whose hidden tests are in `test_patch`. The script applies the test patch."""
    patch = _text(place, row, "test_patch")
    tests = test_ids(place, "FAIL_TO_PASS", row.get("FAIL_TO_PASS"))
    command = _command(place, override, patched_files(patch), cases_of(patch, tests))
    image = derived_image(_IMAGES[form], _text(place, row, "instance_id"))
    return {**row, **_script(command, patch, override), **_image(row, image), **_PLACE}


def _swe_smith(place: str, row: Row, override: Override) -> Row:
    """Prepare a row whose tests are in the image already. `patch` is reversed."""
    bug = _text(place, row, "patch")
    try:
        solution = reversed_patch(bug)
    except ValueError as error:
        raise ValueError(f"{place}: patch: {error}; leave this row out with --skip") from error
    tests = {name: test_ids(place, name, row.get(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    files = files_of_tests(tests["FAIL_TO_PASS"])
    command = _command(place, override, files, cases_of("", tests["FAIL_TO_PASS"]))
    if "{files}" in override.test_command:
        tests["PASS_TO_PASS"] = [test for test in tests["PASS_TO_PASS"] if test.partition("::")[0] in files]
    planted = {"base_patch": bug, "patch": solution, "hidden_files": files}
    return {**row, **tests, **planted, **_script(command, "", override), **_PLACE}


def _command(place: str, override: Override, files: list[str], cases: list[str]) -> str:
    try:
        return filled_in(override.test_command, files=files, cases=cases)
    except ValueError as error:
        raise ValueError(f"{place}: test_patch, FAIL_TO_PASS: {error}; {_OVERRIDE}") from error


def _script(command: str, test_patch: str, override: Override, workspace: str = WORKSPACE) -> Row:
    script = eval_script(command, test_patch, workspace)
    return {"eval_script": script, "log_parser": override.log_parser, "eval_type": "pass_and_fail"}


def _image(row: Row, published: str | None) -> Row:
    """Return the published image as a field, or nothing where the row names an image by any of the known names."""
    return {} if any(row.get(name) for name in IMAGE_NAMES) else {"image": published}


def _text(place: str, row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {name}: expected a text that is not empty, got {value!r}")
    return value


def _check(place: str, row: Row, directory: Path) -> None:
    """Raise `ValueError`, with the place and the field, where the loader or the evaluator rejects the row."""
    task = to_task(place, row, directory, FileSelection())
    if task.image:
        _check_home(task)
    try:
        SweOptions.model_validate(swe_options(task))
    except ValidationError as error:
        raise ValueError(f"{place}: {in_one_line(error, whole='row')}") from error


def _check_home(task: Task) -> None:
    """Raise `ValueError` where the tests need files in the home of root, which the user of a sandbox cannot read."""
    name = "eval_script" if task.eval_script else "test_command"
    commands = (task.eval_script or task.test_command).replace(task.test_patch.strip(), "")
    if named := re.search(r"(?<![\w.])/root/[\w./+-]+", commands):
        raise ValueError(f"{task.place}: {name}: names {named[0]}, {_NOT_READ}; {_OVERRIDE}")
    for program, (path, settings) in _OF_ROOT.items():
        used = re.search(rf"(?:^|[\s;&|(])({program})\s", commands, re.MULTILINE)
        if used and not any(setting in commands for setting in settings):
            cure = f"take an image that has it elsewhere, and name the place with {settings[0]}: {_OVERRIDE}"
            raise ValueError(f"{task.place}: {name}: {used[1]!r} needs {path}, {_NOT_READ}; {cure}")
