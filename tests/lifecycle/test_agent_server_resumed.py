"""An agent server for NeMo Gym that was killed goes on with the rows that it had begun."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import date
from pathlib import Path

from polar_gym.gateway.node.state import Key, StateDirectory
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.nemo.rows import row
from polar_gym.tasks.bundled import BundledTasks
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking

NEVER_THE_SAME = "import time, uuid; ask(messages=[{'role': 'user', 'content': uuid.uuid4().hex}]); time.sleep(3600)"


def settings_of(state: Path, lines: str) -> AgentSettings:
    polar = {
        "harness": asking(lines).model_dump(),
        "runtime": "bubblewrap",
        "engine": {"name": "embedded", "scripts": [{"match": "", "final_message": "Done."}]},
        "evaluator": "session_completion",
        "rollout": {"state": str(state)},
    }
    return AgentSettings(resume=True, polar=polar)


async def cut_off(settings: AgentSettings, records: StateDirectory, sessions: int, day: date | None = None) -> None:
    """Roll out a row until so many sessions have a delivered call, and stop the server then. `day`: the day of the
    server's start, for `harness.today=auto`."""
    rollouts = Rollouts(settings)
    rollouts.configs = [
        config.model_copy(update={"harness": config.harness.model_copy(update={"today": day})})
        for config in rollouts.configs
    ]
    running = asyncio.create_task(rollouts.run(row(BundledTasks(BundledTasks.Options()).load()[0])))
    while sum(sampled(path) for path in records.root.rglob("calls.jsonl")) < sessions:
        assert not running.done(), running.result()
        await asyncio.sleep(0.02)  # a journal has no event to wait for
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await rollouts.close()


def sampled(journal: Path) -> bool:
    return any(call.outcome == "delivered" for call in read_journal(journal))


async def test_a_row_that_diverged_goes_on_with_the_session_that_took_its_place(tmp_path: Path) -> None:
    """Guards against sampled tokens that no row is answered with: those of the session that began again."""
    need_bubblewrap()
    records = StateDirectory(tmp_path)
    settings = settings_of(tmp_path, NEVER_THE_SAME)
    await cut_off(settings, records, 1)
    (first,) = records.known()
    await cut_off(settings, records, 2)
    endings = {key: records.files(key).ending() for key in records.known()}
    assert sorted(map(str, endings.values())) == ["None", "None", "diverged"]
    (second,) = (key for key, ending in endings.items() if ending is None and key != first)
    await cut_off(settings, records, 3)
    assert goes_on(records, second)


def goes_on(records: StateDirectory, key: Key) -> bool:
    """Return whether a session was started from the record of this one."""
    starts = [records.read_manifest(each).request.start_from for each in records.known()]
    return str(records.files(key).directory) in [start.record for start in starts if start is not None]


async def test_a_row_goes_on_with_its_record_on_the_next_day(tmp_path: Path) -> None:
    """Guards against sampled tokens that are thrown away: with another date in its prompt, a row begins again."""
    need_bubblewrap()
    records, settings = StateDirectory(tmp_path), settings_of(tmp_path, "import time; ask(); time.sleep(3600)")
    await cut_off(settings, records, 1, date(2026, 1, 5))
    (first,) = records.known()
    await cut_off(settings, records, 2, date(2026, 1, 6))
    (again,) = (key for key in records.known() if key != first)
    assert goes_on(records, first)
    assert records.read_manifest(again).request.agent.today == date(2026, 1, 5)
    assert [call.replayed is not None for call in read_journal(records.files(again).journal)] == [True]


async def test_a_server_takes_no_row_of_a_live_server_for_its_own(tmp_path: Path) -> None:
    """Guards against a sampled token that is trained twice: two servers had one directory of records."""
    need_bubblewrap()
    records, settings = StateDirectory(tmp_path), settings_of(tmp_path, "import time; ask(); time.sleep(3600)")
    live, other, asked = Rollouts(settings), Rollouts(settings), row(BundledTasks(BundledTasks.Options()).load()[0])
    running = asyncio.create_task(live.run(asked))
    while not any(map(sampled, records.root.rglob("calls.jsonl"))):
        assert not running.done(), running.result()
        await asyncio.sleep(0.02)  # a journal has no event to wait for
    async with asyncio.timeout(60):
        refused = await other.run(asked)
    said = f"polar.rollout.state={tmp_path}: another process serves it; stop that one, or set polar.rollout.state to"
    assert refused["mask_sample"]
    assert refused["failure_reason"].startswith(said)
    assert len(list(records.known())) == 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await live.close()
    await other.close()
