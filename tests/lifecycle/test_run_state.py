"""Runs of the command line go on with their own sessions, and with no session of another run."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.engines import EngineError
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.state import SessionFiles
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.runs.run import roll_out
from polar_gym.runtimes import scratch_directory
from polar_gym.schema import Episode
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking

CONSOLE = Console(file=io.StringIO())


def config_of(output: Path, harness: str = "ask()", **settings: Any) -> RunConfig:
    """Return the config of a run of one task, whose harness is these lines of Python."""
    own = {
        "harness": asking(harness).model_dump(),
        "runtime": "bubblewrap",
        "evaluator": "session_completion",
        "engine": {"name": "embedded", "scripts": [{"match": "", "final_message": "Done."}]},
        "tasks": {"limit": 1},
        **settings,
    }
    return load_config(settings=own).with_rollout(output=output)


async def ended(config: RunConfig, *, resume: bool = False, samples: int = 1) -> list[Episode]:
    """Run so many samples to their end; return the new episodes."""
    return await roll_out(config.with_rollout(num_samples=samples), CONSOLE, resume=resume)


def call_ids(episodes: list[Episode]) -> set[str]:
    return {call.call_id for episode in episodes for call in read_calls(episode)}


@pytest.mark.parametrize("name", ["run.jsonl", "other.jsonl"])
async def test_a_run_goes_on_with_no_session_of_a_run_before_it(tmp_path: Path, name: str) -> None:
    """Guards against tokens that two files train: the first run wrote the same file, or one beside it."""
    need_bubblewrap()
    first = await ended(config_of(tmp_path / name), samples=2)
    config = config_of(tmp_path / "run.jsonl")
    await ended(config)
    (second,) = await ended(config, resume=True, samples=2)
    assert second.request.start_from is None, "this sample had not begun in the run that goes on"
    episodes = list(read_episodes(tmp_path / "run.jsonl"))
    assert [episode.session.sample_index for episode in episodes] == [0, 1]
    assert not call_ids(episodes) & call_ids(first), "the journals of the first run are there, and are its own"


async def begin(config: RunConfig, *, resume: bool = False, sessions: int = 1) -> asyncio.Task[list[Episode]]:
    """Begin a run whose harness does not end, and wait until so many sessions have a delivered call."""
    run = asyncio.create_task(ended(config, resume=resume))
    while len(list(answered(config.rollout.output.parent))) < sessions:
        assert not run.done(), run.result()
        await asyncio.sleep(0.02)  # a journal has no event to wait for
    return run


def answered(folder: Path) -> Iterator[Path]:
    """Yield the directory of each session of which a call was delivered."""
    for journal in folder.rglob("calls.jsonl"):
        if any(call.outcome == "delivered" for call in read_journal(journal)):
            yield journal.parent


async def stop(run: asyncio.Task[list[Episode]]) -> None:
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run


async def test_a_run_that_goes_on_removes_what_an_ended_session_left(tmp_path: Path) -> None:
    """Guards against sandboxes that stayed for ever: only sessions without an episode were looked at."""
    need_bubblewrap()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    config = config_of(tmp_path / "run.jsonl", runtime={"name": "bubblewrap", "scratch": str(scratch)})
    (episode,) = await ended(config)
    SessionFiles(Path(str(episode.artifacts.journal)).parent).sandboxes_left.touch()
    scratch_directory.make(episode.session.label, scratch)
    await ended(config, resume=True, samples=2)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
async def test_a_run_is_refused_while_another_one_writes_its_file(tmp_path: Path, resume: bool) -> None:
    """Guards against a run that takes the sessions of a live one for its own, and removes their sandboxes."""
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", "import time; ask(); time.sleep(3600)")
    live = await begin(config)
    with pytest.raises(ConfigError, match=rf"a run that writes {tmp_path}/run\.jsonl is live"):
        async with asyncio.timeout(10):
            await ended(config, resume=resume)
    assert not live.done()
    await stop(live)
    assert (tmp_path / "run.jsonl").exists(), "the file of the live run was not set aside"
    (episode,) = await ended(config_of(tmp_path / "run.jsonl"))
    assert episode.session.failure is None, "a run that was stopped holds nothing"


async def test_a_state_directory_belongs_to_one_output(tmp_path: Path) -> None:
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", rollout={"state": str(tmp_path / "journals")})
    await ended(config)
    with pytest.raises(ConfigError, match=rf"the sessions there are of {tmp_path}/run\.jsonl; name a directory"):
        await ended(config.with_rollout(output=tmp_path / "other.jsonl"))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    config = config.with_rollout(output=moved / "run.jsonl", state=moved / "journals")
    (episode,) = await ended(config, resume=True, samples=2)
    assert episode.session.sample_index == 1, "a folder may be moved"


async def test_a_run_that_cannot_start_hides_no_session(tmp_path: Path) -> None:
    """The next resumption goes on with the run that wrote the file."""
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", "import time; ask(); time.sleep(3600)")
    await stop(await begin(config))
    (first,) = answered(tmp_path)
    away = config_of(tmp_path / "run.jsonl", engine={"name": "vllm", "url": "http://127.0.0.1:1"})
    with pytest.raises(EngineError):
        await ended(away)
    resumed = await begin(config, resume=True, sessions=2)
    await stop(resumed)
    assert {path.name for path in answered(tmp_path)} == {first.name, first.name.replace(".0", ".1")}


async def test_a_run_goes_on_with_the_session_that_began_after_a_divergence(tmp_path: Path) -> None:
    """Guards against sampled tokens that are in no episode: those of the session that took the place of another one."""
    need_bubblewrap()
    never_the_same = (
        "import time, uuid; ask(messages=[{'role': 'user', 'content': uuid.uuid4().hex}]); time.sleep(3600)"
    )
    config = config_of(tmp_path / "run.jsonl", never_the_same)
    for sessions in (1, 2, 3):
        await stop(await begin(config, resume=sessions > 1, sessions=sessions))
    diverged = list(read_episodes(tmp_path / "run.jsonl"))
    assert [episode.session.attempt for episode in diverged] == [1, 1], "each session is resumed once"
    sampled = {call.call_id for directory in answered(tmp_path) for call in read_journal(directory / "calls.jsonl")}
    assert len(sampled) == 3
    assert len(sampled - call_ids(diverged)) == 1, "only the session that is under way has no episode yet"
