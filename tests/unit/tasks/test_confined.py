"""A data set is data: its rows name no code of the gateway's machine, and no files but those beside them."""

import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_gym.schema import Workspace
from tests.support.task_files import ROW, git, load, write

CODE = {**ROW, "log_parser": "os:system"}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A repository that no row may read."""
    repository = tmp_path / "elsewhere"
    repository.mkdir()
    (repository / "secret.txt").write_text("secret")
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "secret")
    return repository


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data set's directory."""
    (tmp_path / "data" / "work").mkdir(parents=True)
    return tmp_path / "data"


def row(**fields: Any) -> dict[str, Any]:
    return {"instance_id": "a-1", "problem_statement": "It breaks.", **fields}


def refused(data: Path, match: str, *rows: dict[str, Any], **options: object) -> None:
    with pytest.raises(ValueError, match=match):
        load("jsonl", path=write(data, *rows), **options)


def test_a_row_names_no_code(data: Path) -> None:
    """Guards against `log_parser: os:system`, which ran the test log as a program on the gateway's machine."""
    says = r"tasks\.\w+:1: log_parser: .*a task names no code.* evaluator\.log_parser.*, got 'os:system'"
    refused(data, says, CODE)
    pq.write_table(pa.Table.from_pylist([CODE]), data / "tasks.parquet")
    with pytest.raises(ValueError, match=says):
        load("parquet", path=data / "tasks.parquet")


def test_a_data_set_of_a_hub_names_no_code_and_no_files(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """Guards against rows that were downloaded and name a file below the working directory."""
    rows = [CODE]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows)
    with pytest.raises(ValueError, match=r"owner/set\[test\]:1: log_parser: .*names no code"):
        load("huggingface", dataset="owner/set")
    monkeypatch.chdir(data)
    rows[0] = row(workspace="work")
    with pytest.raises(ValueError, match=r"owner/set\[test\]:1: workspace: 'work': /work is in none of"):
        load("huggingface", dataset="owner/set")


@pytest.mark.parametrize("name", ["/etc", "../elsewhere", "work/../../elsewhere", "link"])
def test_a_workspace_is_below_the_task_file(data: Path, elsewhere: Path, name: str) -> None:
    """Guards against rows that show an agent the gateway's own files."""
    (data / "link").symlink_to(elsewhere)
    refused(data, r"tasks\.jsonl:1: workspace: .* is in none of .*data; .*tasks\.directories", row(workspace=name))


def test_the_operator_may_name_other_directories(data: Path, elsewhere: Path) -> None:
    (task,) = load("jsonl", path=write(data, row(workspace=str(elsewhere))), directories=[str(elsewhere.parent)])
    assert task.workspace == str(elsewhere)


def test_an_image_file_is_below_the_task_file(data: Path, elsewhere: Path) -> None:
    """Guards against rows that have Apptainer open any file or directory of the machine, or a recipe that it runs."""
    says = r"tasks\.jsonl:1: image: .* is in none of .*data; .*tasks\.directories"
    for image in (str(elsewhere), f"docker-archive:{elsewhere}/secret.txt", f"{data}/../elsewhere"):
        refused(data, says, row(image=image))
    for image in ("../x://y.def", "--fakeroot://", "oci:///etc"):
        refused(data, r"tasks\.jsonl:1: image: .*neither an image's name nor an absolute path", row(image=image))
    for image in (f"{data}/work", "registry.example:5000/a/b__c:1", "docker://a/b@sha256:00"):
        (task,) = load("jsonl", path=write(data, row(image=image)))
        assert task.image == image


@pytest.mark.parametrize("name", ["tests", "solution"])
def test_the_directories_of_a_container_are_below_the_task_file(data: Path, elsewhere: Path, name: str) -> None:
    """Guards against rows that run a `test.sh` of the machine, or show its files to a verifier."""
    inside = {"tests": str(data / "work"), "solution": str(data / "work"), "verifier_seconds": 5.0}
    (task,) = load("jsonl", path=write(data, row(image="debian", container=inside)))
    assert task.container is not None
    assert task.container.tests == inside["tests"]
    says = rf"tasks\.jsonl:1: container\.{name}: .* is in none of .*data; .*tasks\.directories"
    refused(data, says, row(image="debian", container=inside | {name: str(elsewhere)}))


def test_a_row_does_not_lead_an_image_template_elsewhere(data: Path) -> None:
    refused(data, "instance_id: '../../a' has a part", row(instance_id="../../a"), image="/images/{instance_id}")


def test_a_workspace_path_stays_inside_the_sandbox(data: Path) -> None:
    """Guards against `/../oldroot/...`, with which bubblewrap makes directories on the gateway's machine."""
    refused(data, r"workspace_path.*absolute path without '\.\.'", {**ROW, "workspace_path": "/../oldroot/tmp/x"})


@pytest.mark.parametrize(
    "path", ["/", "/etc", "//etc/", "/./etc", "/lib64/x", "/usr", "/usr/bin", "/usr/lib/x", "/proc"]
)
def test_a_workspace_is_not_where_programs_come_from(data: Path, path: str) -> None:
    """Guards against an `ld.so.preload` of a data set, which root's programs in a sandbox would load."""
    refused(data, r"workspace_path.*outside of the system's directories", {**ROW, "workspace_path": path})


@pytest.mark.parametrize("path", ["/workspace", "/testbed", "/usr/src/app", "/home/user/etc", "/library"])
def test_a_workspace_may_be_anywhere_else(path: str) -> None:
    assert Workspace(path=path).path == path


def _as_file(git_dir: Path, elsewhere: Path) -> None:
    git_dir.write_text(f"gitdir: {elsewhere}/.git\n")


def _as_link(git_dir: Path, elsewhere: Path) -> None:
    git_dir.symlink_to(elsewhere / ".git")


def _by_common_directory(git_dir: Path, elsewhere: Path) -> None:
    git_dir.mkdir()
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")
    (git_dir / "commondir").write_text(f"{elsewhere}/.git\n")


def _borrowing(git_dir: Path, elsewhere: Path) -> None:
    """A repository without objects of its own."""
    subprocess.run(["git", "init", "-q", "-b", "main", git_dir.parent], check=True)
    (git_dir / "refs" / "heads" / "main").write_text(git(elsewhere, "rev-parse", "HEAD") + "\n")


def _by_alternates(git_dir: Path, elsewhere: Path) -> None:
    _borrowing(git_dir, elsewhere)
    (git_dir / "objects" / "info" / "alternates").write_text(f"{elsewhere}/.git/objects\n")


def _by_quoted_alternates(git_dir: Path, elsewhere: Path) -> None:
    _borrowing(git_dir, elsewhere)
    (git_dir / "objects" / "info" / "alternates").write_text(f'"{elsewhere}/.git/objects"\n')


def _by_alternates_of_alternates(git_dir: Path, elsewhere: Path) -> None:
    _borrowing(git_dir, elsewhere)
    between = git_dir.parent.parent / "between" / "objects"
    (between / "info").mkdir(parents=True)
    (between / "info" / "alternates").write_text(f"{elsewhere}/.git/objects\n")
    (git_dir / "objects" / "info" / "alternates").write_text(f"{between}\n")


def _by_linked_objects(git_dir: Path, elsewhere: Path) -> None:
    _borrowing(git_dir, elsewhere)
    subprocess.run(["rm", "-r", git_dir / "objects"], check=True)
    (git_dir / "objects").symlink_to(elsewhere / ".git" / "objects")


WAYS = [
    *(_as_file, _as_link, _by_common_directory, _by_alternates, _by_quoted_alternates),
    *(_by_alternates_of_alternates, _by_linked_objects),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_workspace_borrows_from_no_repository_elsewhere(data: Path, elsewhere: Path, way: Any) -> None:
    """Guards against a `.git` in a data set that shows an agent another repository of the machine."""
    way(data / "work" / ".git", elsewhere)
    refused(data, r"tasks\.jsonl:1: workspace: 'work': .*elsewhere|quotes a name", row(workspace="work"))


def test_a_workspace_may_borrow_from_beside_the_task_file(data: Path, elsewhere: Path) -> None:
    elsewhere.rename(data / "pool")
    _by_alternates(data / "work" / ".git", data / "pool")
    (task,) = load("jsonl", path=write(data, row(workspace="work")))
    assert task.workspace == str(data / "work")
