"""A seed fixes a run, but not all calls of the run alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Sampling
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import ASK, node, task


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
