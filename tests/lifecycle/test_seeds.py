"""A seed fixes a run, but not all calls of the run alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_gym.episodes.reading import read_calls
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.gateway.session.branching import branch_of
from polar_gym.schema import Sampling
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import ASK, asking, node, task


async def seeds(directory: Path, seed: int | None) -> list[Any]:
    """Return the seeds of the calls of two samples of a task."""
    agent = {"name": "command", "command": ["python3", "-c", f"{ASK}\nask()\nask()"]}
    request = task(agent=agent, sampling=Sampling(seed=seed))
    async with node(directory) as started:
        episodes = [await started.rollout(request, index) for index in range(2)]
        journals = [read_journal(Path(str(episode.artifacts.journal))) for episode in episodes]
    return [call.sampling.get("seed") for calls in journals for call in calls]


@pytest.mark.parametrize("seed", [0, 7])
async def test_calls_of_a_group_have_seeds_of_their_own(seed: int, tmp_path: Path) -> None:
    """Guards against a group whose samples are all the same session, because every call had the run's seed."""
    need_bubblewrap()
    first = await seeds(tmp_path / "first", seed)
    assert len(set(first)) == len(first) == 4
    assert all(0 <= each < 2**31 for each in first)
    assert await seeds(tmp_path / "again", seed) == first
    assert Sampling(seed=seed + 1).of_call("t", 0, 0).seed not in first


async def test_without_a_seed_the_engine_draws_one(tmp_path: Path) -> None:
    need_bubblewrap()
    assert await seeds(tmp_path, None) == [None] * 4


async def branches(directory: Path) -> list[Any]:
    """Return the seeds of the second call of a sample, of two branches of it, and of two branches of a branch."""
    request = task(agent=asking("ask()\nask()"), sampling=Sampling(seed=7))
    async with node(directory) as started:
        first = await started.rollout(request, 0)
        group = [await started.rollout(branch_of(first, 1), index) for index in range(2)]
        nested = [await started.rollout(branch_of(group[0], calls), 0) for calls in (0, 1)]
        played = [read_calls(episode) for episode in (first, *group, *nested)]
    assert [call.replayed is not None for calls in played for call in calls] == [
        *(False, False),
        *(True, False) * 2,
        *(False, False),
        *(True, False),
    ]
    return [calls[1].sampling.get("seed") for calls in played]


async def test_a_branch_does_not_repeat_its_session(tmp_path: Path) -> None:
    """Guards against a branch with the sample index of its session, which sampled the same tokens again and counted as
    another sample of that state: an environment counts indices from 0, and so does each task of the service."""
    need_bubblewrap()
    first = await branches(tmp_path / "first")
    assert len(set(first)) == len(first) == 5
    assert await branches(tmp_path / "again") == first
    assert first[0] == Sampling(seed=7).of_call("t", 0, 1).seed == 1744349765, (
        "sessions that are no branches keep their seeds"
    )
