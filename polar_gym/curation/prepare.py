"""Rows of other people's data sets, made to say by themselves how they are graded.

A row of SWE-bench (before swebench 5), SWE-Gym or SWE-smith leaves that to the harness that it was published with. What
those know is put into the row once, so that a run needs neither them nor a network:

- SWE-bench and SWE-bench Verified: what swebench 4 makes of the row (`swebench_specs`).
- SWE-Gym, and SkyRL-v0-293-data, which has the row under `instance`
  (https://huggingface.co/datasets/SWE-Gym/SWE-Gym): pytest on the files of the test patch, with the options that
  https://github.com/SWE-Gym/SWE-Bench-Fork (`swebench/harness/constants.py`) has for the repository. Images are
  `xingyaoww/sweb.eval.x86_64.OWNER_s_NAME-NUMBER` (https://github.com/SWE-Gym/OpenHands, `evaluation/swe_bench`).
- SWE-smith (https://huggingface.co/datasets/SWE-bench/SWE-smith; https://github.com/SWE-bench/SWE-smith,
  `swesmith/harness`): `patch` plants the bug into the image's repository, so it becomes `base_patch`, and `patch` its
  reverse. The tests are those of the files that FAIL_TO_PASS names, which are hidden from the agent; tests of other
  files are no part of the verdict, as in `swesmith.harness.grading`.

`overrides` says, for a repository, how its tests run where this does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

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
from polar_gym.evaluators.swe import SweOptions
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


class Override(BaseModel):
    """How the tests of one repository run."""

    model_config = ConfigDict(extra="forbid")

    test_command: str
    """In the image's environment. `{files}`: the test files; `{cases}`: `'case or case'`."""
    log_parser: str = "pytest"


Overrides = dict[str, Override]
"""By repository, `owner/name`."""


def _gym(command: str, log_parser: str = "parse_log_pytest") -> Override:
    """SWE-Gym's test ids were written by swebench's parser, which cuts them at the first blank."""
    return Override(test_command=command, log_parser=log_parser)


_ONE_PROCESS = _gym("pytest -n0 -rA --color=no {files}")
"""For repositories whose configuration has pytest run in many."""
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
_SWE_SMITH = Override(test_command="pytest -rA --color=no {files}")
_IMAGES: dict[Form, str] = {
    "swe_bench": "swebench/sweb.eval.x86_64.{docker_id}:latest",
    "swe_gym": "xingyaoww/sweb.eval.x86_64.{gym_id}:latest",
}
_OVERRIDE = "say how its tests run in the file of --overrides, as `OWNER/NAME: {test_command: ..., log_parser: ...}`"


@dataclass(slots=True)
class Prepared:
    rows: list[Row] = field(default_factory=list)
    """Those that say how they are graded, in the order of the file."""
    problems: list[str] = field(default_factory=list)
    """One for each other row: file, line, field, what is wrong, and what to do."""


def read_overrides(path: Path) -> Overrides:
    """Of a YAML file. Raises `ValueError` naming the file and the key."""
    try:
        return TypeAdapter(Overrides).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot read the overrides: {error}") from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{path}: {'; '.join(problems)}") from error


def prepare(path: Path, form: Form, overrides: Overrides, cache: Path, image: str | None = None) -> Prepared:
    """`image` (as `FileSelection.image`) goes before the images that the data sets were published with.

    Blocks. Raises `ValueError` where the file cannot be read, `CurationError` where swebench 4 cannot be had.
    """
    placed = [
        (place, row["instance"] if isinstance(row.get("instance"), dict) else row) for place, row in read_rows(path)
    ]
    known = _specifications(placed, form, overrides, cache)
    prepared = Prepared()
    for place, row in placed:
        try:
            made = row if _says(row) else _made(place, row, _form(row, form), overrides, known.get(place))
            if image:
                made = {**made, "image": derived_image(image, str(made.get("instance_id", "")))}
            _check(place, made, path.parent)
            prepared.rows.append(made)
        except ValueError as error:
            prepared.problems.append(str(error))
    return prepared


def repository(row: Row) -> str:
    """`owner/name`; SWE-smith has it as `swesmith/owner__name.commit`."""
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
    """Whether the row says how its tests run, as those of swebench 5 do."""
    return bool(row.get("eval_script") or row.get("test_command"))


def _specifications(
    placed: list[PlacedRow], form: Form, overrides: Overrides, cache: Path
) -> dict[str, dict[str, str]]:
    """By place, what swebench 4 says of the rows that are for it to specify, all at once: asking takes seconds."""
    asked = [
        (place, row)
        for place, row in placed
        if _form(row, form) == "swe_bench"
        and not _says(row)
        and repository(row) not in overrides
        and all(isinstance(row.get(name), str) for name in FIELDS)
    ]
    return dict(zip([place for place, _ in asked], specifications([row for _, row in asked], cache), strict=True))


def _made(place: str, row: Row, form: Form, overrides: Overrides, specification: dict[str, str] | None) -> Row:
    """Raises `ValueError` naming the place and the field."""
    override = overrides.get(repository(row))
    if form == "swe_smith":
        return _swe_smith(place, row, override or _SWE_SMITH)
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
    """The hidden tests are in `test_patch`; the script applies it."""
    patch = _text(place, row, "test_patch")
    tests = test_ids(place, "FAIL_TO_PASS", row.get("FAIL_TO_PASS"))
    command = _command(place, override, patched_files(patch), cases_of(patch, tests))
    image = derived_image(_IMAGES[form], _text(place, row, "instance_id"))
    return {**row, **_script(command, patch, override), **_image(row, image), **_PLACE}


def _swe_smith(place: str, row: Row, override: Override) -> Row:
    """The tests are in the image already. `patch` is turned round."""
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


def _script(command: str, test_patch: str, override: Override) -> Row:
    script = eval_script(command, test_patch)
    return {"eval_script": script, "log_parser": override.log_parser, "eval_type": "pass_and_fail"}


def _image(row: Row, published: str | None) -> Row:
    """The row's own image, by whatever name it has it, goes before the published one."""
    return {} if any(row.get(name) for name in IMAGE_NAMES) else {"image": published}


def _text(place: str, row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {name}: expected a text that is not empty, got {value!r}")
    return value


def _check(place: str, row: Row, directory: Path) -> None:
    """Whether the loader and the evaluator take the row. Raises `ValueError` naming the place and the field."""
    task = to_task(place, row, directory, FileSelection())
    try:
        SweOptions.model_validate(swe_options(task))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc'])) or 'row'}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{place}: {'; '.join(problems)}") from error
