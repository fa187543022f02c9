"""A task of one's own: the workspace that it names, and the one that its settings configure."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from polar_gym import ConfigError
from polar_gym.config.run_config import RolloutConfig
from polar_gym.envs.setup import swe_setup, task_setup
from polar_gym.envs.single import branched
from tests.support.episodes import make_episode

ENGINE = {"name": "embedded", "scripts": [{"commands": ["ls"]}]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a committed file, and an ignored one."""
    (tmp_path / "test_it.py").write_text("one")
    (tmp_path / ".gitignore").write_text("*.log")
    (tmp_path / "run.log").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "begin")
    return tmp_path


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True)


def test_a_branch_is_of_the_task_that_was_asked_for() -> None:
    """Guards against an episode of another task than `reset` named."""
    episode = make_episode("x", 1.0, task_id="a")
    episode.artifacts.journal = "/state/x/calls.jsonl"
    assert branched((episode, 1), "a").task_id == branched((episode, 1)).task_id == "a"
    with pytest.raises(ValueError, match=r"options\['task_id'\]='b': the branch is of task 'a'; leave it out"):
        branched((episode, 1), "b")


def test_a_workspace_keeps_what_the_settings_say_of_it(tmp_path: Path) -> None:
    """Guards against packages and a path that are dropped without an error."""
    runtime = {"name": "bubblewrap", "workspace": {"python_requirements": ["pytest==8.4.2"], "path": "/repo"}}
    (request,) = task_setup("Go.", workspace=tmp_path, runtime=runtime, engine=ENGINE).requests.values()
    workspace = request.runtime.workspace
    assert (workspace.source, workspace.path) == (str(tmp_path), "/repo")
    assert workspace.python_requirements == ["pytest==8.4.2"]


def test_a_repository_is_refused_whose_copy_would_lack_files(repository: Path) -> None:
    """Guards against a harness that never sees the failing test, and a reward for a commit that passes without it."""
    (request,) = task_setup("Go.", workspace=repository, engine=ENGINE).requests.values()
    assert request.runtime.workspace.source == str(repository)
    (repository / "test_it.py").write_text("two")
    (repository / "new.py").touch()
    with pytest.raises(ConfigError, match=r"the commit at HEAD, without test_it\.py, new\.py; commit the changes"):
        task_setup("Go.", workspace=repository, engine=ENGINE)
    git(repository, "add", "--all")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},library")
    git(repository, "commit", "--quiet", "--message", "with a submodule")
    with pytest.raises(ConfigError, match="without library; "):
        task_setup("Go.", workspace=repository, engine=ENGINE)


def test_tasks_of_several_environments_have_ids_of_their_own(tmp_path: Path) -> None:
    """Guards against one group, and one row of `polar-gym eval`, for all tasks of `polar/task`, which had one id."""
    others = [tmp_path / "one", tmp_path / "two"]
    for directory in others:
        directory.mkdir()
    setups = [task_setup("Go.", workspace=directory, engine=ENGINE) for directory in [*others, None]]
    setups.append(task_setup("Stop.", engine=ENGINE))
    ids = [task_id for setup in setups for task_id in setup.requests]
    assert len(set(ids)) == 4
    assert ids == [request.task_id for setup in setups for request in setup.requests.values()]
    again = task_setup("Go.", workspace=others[0], engine=ENGINE, rollout={"timeout_seconds": 9})
    assert list(again.requests) == ids[:1], "the same task has the same id"
    assert list(task_setup("Go.", task_id="mine", engine=ENGINE).requests) == ["mine"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rollout": {"num_samples": 16}}, r"rollout\.num_samples=16: has no effect here: .*; set num_envs"),
        ({"rollout": {"output": "x.jsonl"}}, r"rollout\.output=x\.jsonl: has no effect here: .* writes no file; write"),
        ({"rollout": {"metrics": "wandb"}}, r"rollout\.metrics=wandb: has no effect here: .* logs no figures"),
        ({"rollout": RolloutConfig(num_samples=16)}, r"rollout\.num_samples=16: has no effect here"),
        ({"pools": {"run": 2}}, r"pools\.run=2: has no effect here: .*; set num_envs"),
        ({"pools": {"prewarm": 0}}, r"pools\.prewarm=0: has no effect here: .* comes up at its end"),
    ],
)
def test_settings_of_a_run_that_an_environment_does_not_use_are_refused(settings: dict[str, Any], error: str) -> None:
    """Guards against one session where sixteen were asked for, a file that is never written, and eight harnesses at
    once where `pools.run` said two."""
    with pytest.raises(ConfigError, match=error):
        swe_setup(**settings)
    with pytest.raises(ConfigError, match=error):
        task_setup("Go.", **{"engine": ENGINE, **settings})


def test_settings_as_they_are_by_default_are_no_error() -> None:
    given = {"output": "outputs/episodes.jsonl", "num_samples": "1"}
    assert task_setup("Go.", engine=ENGINE, rollout=given).config.rollout.num_samples == 1


def test_an_environment_of_one_task_needs_its_instruction() -> None:
    with pytest.raises(ConfigError, match="instruction='': is required"):
        task_setup(engine=ENGINE)


def test_tasks_beside_an_instruction_are_refused() -> None:
    """Guards against a file of tasks that no session ever saw."""
    with pytest.raises(ConfigError, match=r"tasks=.*: has no effect here: the instruction is the task"):
        task_setup("Go.", engine=ENGINE, tasks={"name": "jsonl", "path": "/missing.jsonl"})


def test_a_recipe_of_runs_makes_an_environment() -> None:
    """Guards against a recipe that is refused for its own settings of `polar-gym rollout`."""
    engine = {"name": "vllm", "url": "http://127.0.0.1:1"}
    assert swe_setup(recipe="swe_rollout", engine=engine).config.rollout.num_samples == 16
