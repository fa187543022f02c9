"""Runs of the command line go on with their own sessions, and with no session of another run."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.engines import EngineError
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.errors import ConfigError, UnavailableError
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.gateway.node.state import SessionFiles, StateDirectory
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.gateway.session.branching import branch_of
from polar_gym.gateway.session.starting import Manifest
from polar_gym.harnesses import HARNESSES
from polar_gym.runs.run import Sample, roll_out, run_samples
from polar_gym.runs.settings import begin as begin_settings
from polar_gym.runs.state import own_state
from polar_gym.runtimes import agent, scratch_directory
from polar_gym.schema import Episode, PluginSpec
from polar_gym.tasks.bundled import SUITE
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import INFO, asking

CONSOLE = Console(file=io.StringIO())


def config_of(output: Path, lines: str = "ask()", **settings: Any) -> RunConfig:
    """Return the config of a run of one task, whose harness is these lines of Python."""
    own = {
        "harness": asking(lines).model_dump(),
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
    _, second = await ended(config, resume=True, samples=2)
    assert second.request.start_from is None, "this sample had not begun in the run that goes on"
    episodes = list(read_episodes(tmp_path / "run.jsonl"))
    assert [episode.session.sample_index for episode in episodes] == [0, 1]
    assert not call_ids(episodes) & call_ids(first), "the journals of the first run are there, and are its own"


async def begin(
    config: RunConfig, *, resume: bool = False, sessions: int = 1, samples: int = 1
) -> asyncio.Task[list[Episode]]:
    """Begin a run whose harness does not end, and wait until so many sessions have a delivered call."""
    run = asyncio.create_task(ended(config, resume=resume, samples=samples))
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


@pytest.mark.parametrize("key", ["tasks.path", "rollout.output", "rollout.state"])
async def test_a_run_whose_sandboxes_show_its_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Guards against agents without an image that read the run's tasks, episodes or journals below the machine's /usr.
    Another directory stands for /usr."""
    need_bubblewrap()
    (shown := tmp_path / "usr").mkdir()
    monkeypatch.setattr(agent, "USR", shown)
    of = {name: shown if name == key else tmp_path for name in ("tasks.path", "rollout.output", "rollout.state")}
    shutil.copytree(SUITE.parent, of["tasks.path"] / "suite")
    path = of["tasks.path"] / "suite" / SUITE.name
    config = config_of(of["rollout.output"] / "run.jsonl", tasks={"name": "jsonl", "path": str(path), "limit": 1})
    config = config.with_rollout(state=of["rollout.state"] / "state")
    with pytest.raises(ConfigError, match=rf"^{key}='{shown}/.*move it to a directory outside"):
        await ended(config)
    monkeypatch.setattr(agent, "USR", tmp_path / "another")
    (episode,) = await ended(config)
    assert episode.session.failure is None


@pytest.mark.parametrize("resume", [False, True])
async def test_a_run_is_refused_while_another_one_writes_its_file(tmp_path: Path, resume: bool) -> None:
    """Guards against a run that takes the sessions of a live one for its own, and removes their sandboxes."""
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", "import time; ask(); time.sleep(3600)")
    live = await begin(config)
    with pytest.raises(UnavailableError, match=rf"a run that writes {tmp_path}/run\.jsonl is live"):
        async with asyncio.timeout(10):
            await ended(config, resume=resume)
    assert not live.done()
    await stop(live)
    assert (tmp_path / "run.jsonl").exists(), "the file of the live run was not set aside"
    (episode,) = await ended(config_of(tmp_path / "run.jsonl"))
    assert episode.session.failure is None, "a run that was stopped holds nothing"


@pytest.mark.parametrize("name", ["run.jsonl", "link.jsonl"])
async def test_a_run_of_another_state_is_refused_while_its_file_is_written(tmp_path: Path, name: str) -> None:
    """Guards against two runs that each truncate the file of the other, and lose all episodes of both: each had a
    `rollout.state` of its own, or one wrote by a link."""
    need_bubblewrap()
    (tmp_path / "link.jsonl").symlink_to("run.jsonl")
    live = await begin(config_of(tmp_path / "run.jsonl", "import time; ask(); time.sleep(3600)"))
    other = config_of(tmp_path / name).with_rollout(state=tmp_path / "other")
    refused = (
        rf"^rollout\.output='{tmp_path}/{name}': a run that writes {tmp_path}/run\.jsonl is live; wait for its end,"
    )
    with pytest.raises(ConfigError, match=refused):
        async with asyncio.timeout(60):
            await ended(other)
    assert not live.done()
    await stop(live)
    assert not (tmp_path / "run.1.jsonl").exists(), "the file of the live run was not set aside"


async def test_a_state_directory_belongs_to_one_output(tmp_path: Path) -> None:
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", rollout={"state": str(tmp_path / "journals")})
    await ended(config)
    with pytest.raises(ConfigError, match=rf"the sessions there are of {tmp_path}/run\.jsonl; name a directory"):
        await ended(config.with_rollout(output=tmp_path / "other.jsonl"))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    config = config.with_rollout(output=moved / "run.jsonl", state=moved / "journals")
    _, episode = await ended(config, resume=True, samples=2)
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


async def test_a_run_that_is_killed_as_it_begins_leaves_no_episodes_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `--resume`, which took the earlier run's episodes for those of the run that was killed."""
    need_bubblewrap()
    await ended(config_of(tmp_path / "run.jsonl"))

    class KilledError(Exception):
        pass

    async def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as context:
        context.setattr("polar_gym.runs.run.reap", killed)
        with pytest.raises(KilledError):
            await ended(config_of(tmp_path / "run.jsonl"))
    assert not (tmp_path / "run.jsonl").exists()
    assert len(list(read_episodes(tmp_path / "run.1.jsonl"))) == 1


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sampling": {"temperature": 0.3}}, "sampling.temperature=0.3: the run began with 1.0"),
        ({"proxy": {"splice": "off"}}, "proxy.splice='off': the run began with 'auto'"),
        ({"evaluator": "swe"}, "evaluator='swe': the run began with 'session_completion'"),
        ({"rollout": {"timeout_seconds": 9}}, "rollout.timeout_seconds=9.0: the run began with 1800.0"),
        ({"engine": {"name": "embedded"}}, "engine.scripts=None: the run began with [{"),
        ({"builder": {"train_rejected": False}}, "builder.train_rejected=False: the run began with True"),
    ],
)
async def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """Guards against a file that mixes the episodes of two runs."""
    need_bubblewrap()
    output = tmp_path / "run.jsonl"
    await ended(config_of(output))
    written = output.read_bytes()
    with pytest.raises(ConfigError) as refused:
        await ended(config_of(output, **changed), resume=True, samples=2)
    first, *others = str(refused.value).splitlines()
    assert first.startswith(f"--resume='{output}': give the settings of the first run again, or set rollout.output to")
    assert [line[2 : 2 + len(said)] for line in others] == [said]
    assert output.read_bytes() == written


@pytest.mark.parametrize("written", [True, False])
async def test_a_file_of_branches_does_not_go_on_as_a_rollout(tmp_path: Path, written: bool) -> None:
    """Guards against a rollout that is appended to branches: their own samples were never continued."""
    need_bubblewrap()
    (first,) = await ended(config_of(tmp_path / "run.jsonl", "ask(); ask()"))
    config = config_of(tmp_path / "branches.jsonl", "ask(); ask()")
    with own_state(config) as state:
        branches = [Sample(branch_of(first, 1), 1)]
        await run_samples(config, load_tasks(config), branches, CONSOLE, state)
    before = config.rollout.output.read_bytes()
    if not written:  # as where it was killed
        config.rollout.output.write_bytes(b"")
    with pytest.raises(ConfigError, match="it has branches"):
        await ended(config, resume=True, samples=2)
    assert config.rollout.output.read_bytes() == (before if written else b"")


@pytest.mark.parametrize("journals", ["there", "moved"])
async def test_a_file_goes_on_with_the_settings_of_its_run_also_without_the_state(
    tmp_path: Path, journals: str
) -> None:
    """Guards against a file that mixes two runs: without the `rollout.state` of the run, nothing was compared."""
    need_bubblewrap()
    output, state = tmp_path / "run.jsonl", tmp_path / "fast"
    (first,) = await ended(config_of(output).with_rollout(state=state))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sampling": {"temperature": 0.25}}, "sampling.temperature=0.25: "),
        ({"budget": {"max_calls": 1}}, "budget.max_calls=1: "),
        ({"builder": "per_request", "tasks": {"instance_ids": ["polar__durations-1"]}}, "builder='per_request': "),
    ]
    if journals == "there":
        refused.append(({"proxy": {"splice": "off"}}, "proxy.splice='off': the run began with 'auto'"))
    else:
        state.rename(tmp_path / "slow")
    for changed, said in refused:
        with pytest.raises(ConfigError, match=rf"^--resume='{output}': .*set rollout\.output to another file") as error:
            await ended(config_of(output, **changed), resume=True, samples=2)
        assert said in str(error.value)
    again = await ended(config_of(output), resume=True, samples=2)
    assert [episode.session.sample_index for episode in again] == [0, 1]
    assert again[0].session == first.session


async def test_a_run_does_not_go_on_with_another_task_or_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one group of samples with two prompts: the file of tasks had changed, or the harness."""
    need_bubblewrap()
    for name in ("first", "moved"):
        shutil.copytree(SUITE.parent, tmp_path / name)
    (output := tmp_path / "outputs" / "run.jsonl").parent.mkdir()

    def config(folder: str) -> RunConfig:
        tasks = {"name": "jsonl", "path": SUITE.name, "limit": 1}
        monkeypatch.chdir(tmp_path / folder)
        return config_of(output, tasks=tasks)

    await ended(config("first"))
    run = await ended(config("moved"), resume=True, samples=2)
    assert len({episode.request.runtime.workspace.source for episode in run}) == 2, "the files of tasks may be moved"
    rows = tmp_path / "moved" / SUITE.name
    whole = rows.read_text()
    rows.write_text(whole.replace('"problem_statement":"', '"problem_statement":"ANOTHER TASK. ', 1))
    with pytest.raises(
        ConfigError, match=r"^--resume=.*: instruction=.\.\.\..*ANOTHER TASK\. .*; give the tasks and the"
    ):
        await ended(config("moved"), resume=True, samples=3)
    rows.write_text(whole)
    other = dataclasses.replace(HARNESSES.get("command"), version="2")
    monkeypatch.setattr(HARNESSES, "get", lambda _: other)
    with pytest.raises(ConfigError, match="command has the version '2', and the run began with ''; go on with a polar"):
        await ended(config("moved"), resume=True, samples=3)


async def test_a_run_goes_on_with_more_samples_more_places_and_another_key(tmp_path: Path) -> None:
    """Guards against a refusal of settings that change no episode, and against an API key on the disk."""
    need_bubblewrap()
    engine = {"name": "embedded", "scripts": [{"match": "", "final_message": "Done."}]}
    config = config_of(tmp_path / "run.jsonl")
    (first,) = await ended(config)
    reference = {"name": "vllm", "url": "http://127.0.0.1:1", "api_key": "a secret"}
    again = config_of(
        tmp_path / "run.jsonl",
        engine={**engine, "delay_seconds": 0.01},
        pools={"run": 9},
        scoring={"share": None},
        tasks={"limit": 2},
    )
    run = await ended(again, resume=True, samples=2)
    assert run[0].session == first.session, "the summary is of the whole run"
    assert len(run) == 4
    begin_settings(again.model_copy(update={"engine": PluginSpec(**reference)}), StateDirectory(tmp_path / "new"), INFO)
    assert "a secret" not in (tmp_path / "new" / "settings.json").read_text()


async def test_a_run_that_goes_on_on_another_day_tells_its_harness_the_first_day(tmp_path: Path) -> None:
    """Guards against two prompts in one group of samples, and against sessions that begin again after midnight."""
    need_bubblewrap()
    config = config_of(tmp_path / "run.jsonl", "import time; ask(); time.sleep(3600)")
    first, second = (
        config.model_copy(update={"harness": config.harness.model_copy(update={"today": date(2026, 1, day)})})
        for day in (5, 6)
    )
    await stop(await begin(first))
    await stop(await begin(second, resume=True, sessions=3, samples=2))
    records = [Manifest.from_json((path / "manifest.json").read_bytes()).request for path in answered(tmp_path)]
    assert [request.agent.today for request in records] == [date(2026, 1, 5)] * 3
    assert sum(request.start_from is not None for request in records) == 1, "the session that was under way goes on"


def test_a_run_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    """Guards against a file of two models' episodes, where `engine.url` leads to another one and names none."""
    config, state = config_of(tmp_path / "run.jsonl"), StateDirectory(tmp_path / "1")
    first = INFO.model_copy(update={"model": "first", "logprobs_mode": None})
    begin_settings(config, state, first)
    begin_settings(config, state, first.model_copy(update={"logprobs_mode": "raw"}))
    with pytest.raises(ConfigError, match="serves the model 'second', and the run began with 'first'; serve that one"):
        begin_settings(config, state, first.model_copy(update={"model": "second"}))


def test_a_run_does_not_go_on_with_another_kind_of_logprobs(tmp_path: Path) -> None:
    """Guards against a file of both kinds, whose interrupted sessions all lose their records."""
    config, state = config_of(tmp_path / "run.jsonl"), StateDirectory(tmp_path / "1")
    begin_settings(config, state, INFO.model_copy(update={"logprobs_mode": "raw"}))
    with pytest.raises(ConfigError, match="gives processed logprobs, and the run began with raw ones; start vLLM as"):
        begin_settings(config, state, INFO)
