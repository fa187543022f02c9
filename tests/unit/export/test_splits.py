"""SFT data: which tasks are for validation."""

import hashlib
import itertools
import json
import random
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar_gym.export import sft
from polar_gym.export.acceptance import Filters
from polar_gym.export.dataset import split_of
from polar_gym.export.sft import export_sft
from polar_gym.schema import Episode, Session
from tests.unit.export.graded_episodes import make_trace, with_traces

SWE_GYM = (
    *("Project-MONAI/MONAI", "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto"),
    *("iterative/dvc", "modin-project/modin", "pandas-dev/pandas", "pydantic/pydantic", "python/mypy"),
)
TASKS_OF_REPOSITORY = 200


def attempt(task: str, number: int, *, repo: str = "", prefix: str = "") -> Episode:
    """An attempt at a task of a data file, which was submitted with this prefix."""
    name = f"{prefix}{task}-{number}"
    ids = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3])
    session = Session(session_id=name, task_id=prefix + task, sample_index=number, harness="pi")
    episode = with_traces(name, make_trace(name, ids), session=session)
    episode.request.metadata.update({"repo": repo, "instance_id": task})
    return episode


def splits_by_task(directory: Path) -> dict[str, set[str]]:
    """Task -> the splits that hold rows of it, as the files say."""
    found: dict[str, set[str]] = {}
    for path in (directory / "jsonl").iterdir():
        for line in path.read_bytes().splitlines():
            task = json.loads(line)["session_id"].rpartition("-")[0].removeprefix("again:")
            found.setdefault(task, set()).add(path.name.partition("-")[0])
    return found


def test_every_repository_has_its_share_of_validation(tmp_path):
    """With whole repositories as groups all eleven of SWE-Gym, and so any seven of them, once fell into train."""
    tasks = [(repo, f"{repo.replace('/', '__')}-{n}") for repo in SWE_GYM for n in range(1000, 9000, 40)]
    assert len(tasks) == len(SWE_GYM) * TASKS_OF_REPOSITORY
    out = tmp_path / "out"
    export_sft((attempt(task, number, repo=repo) for repo, task in tasks for number in range(2)), out, Filters())
    splits = splits_by_task(out)
    assert len(splits) == len(tasks)
    shares = {
        repo: sum(splits[task] == {"validation"} for owner, task in tasks if owner == repo) / TASKS_OF_REPOSITORY
        for repo in SWE_GYM
    }
    assert all(0.04 < share < 0.16 for share in shares.values()), shares
    for seven in itertools.combinations(SWE_GYM, 7):
        assert 0.08 < sum(shares[repo] for repo in seven) / 7 < 0.12, seven


@settings(max_examples=15)
@given(
    tasks=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True),
    chance=st.randoms(use_true_random=False),
)
@example(tasks=[f"pandas-dev__pandas-{number}" for number in range(30)], chance=random.Random(0))
def test_all_rows_of_a_task_are_in_one_split_in_every_directory(tasks, chance):
    """Whatever the order, the parts, the runs and the prefixes of task ids are."""
    episodes = [
        attempt(task, number, prefix=prefix) for task in tasks for number in (0, 1) for prefix in ("", "again:")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for name in ("a", "b"):
            chance.shuffle(episodes)
            half = chance.randrange(len(episodes))
            for part in (episodes[:half], episodes[half:]):
                export_sft(part, Path(scratch, name), Filters())
            found.append(splits_by_task(Path(scratch, name)))
    assert found[0] == found[1] == {task: {split_of(task)} for task in tasks}


@given(st.text())
def test_the_share_is_a_tenth_for_any_names(repo):
    tasks = [f"{repo}-{number}" for number in range(1000)]
    assert 50 < sum(split_of(task) == "validation" for task in tasks) < 150


def test_a_task_stays_where_an_earlier_version_put_it(tmp_path, monkeypatch):
    """Its directory has the task in train, by repository; new attempts at it do not go to the other side."""
    task = next(name for number in range(100) if split_of(name := f"getmoto__moto-{number}") == "validation")
    with monkeypatch.context() as earlier:
        earlier.setattr(sft, "split_of", lambda name: "train")
        export_sft([attempt(task, 0)], tmp_path / "out", Filters())
    export_sft([attempt(task, 1)], tmp_path / "out", Filters())
    assert splits_by_task(tmp_path / "out") == {task: {"train"}}
