"""Sessions of the rollout service whose node is killed: they go on with their record, where a node finds it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar_gym.client import RolloutClient
from polar_gym.episodes.reading import read_calls
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.protocol import JournalPiece, Journals, TaskStatus
from polar_gym.schema import Episode, Retries, TaskRequest
from tests.lifecycle.nodes import NodeProcess
from tests.lifecycle.service_fixtures import rollout_server
from tests.support.processes import free_port
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task

TWO_CALLS = asking("ask(); ask()")
NEVER_THE_SAME = asking("import uuid; ask(messages=[{'role': 'user', 'content': uuid.uuid4().hex}]); ask()")


@asynccontextmanager
async def after_a_death(
    tmp_path: Path, request: TaskRequest, *, elsewhere: bool = False
) -> AsyncIterator[RolloutClient]:
    """Have a node die while it answers the second call of the request's session, and bring up a node that lives: the
    same one with its state, or another one that sees this state."""
    need_bubblewrap()
    async with rollout_server(tmp_path, lease_seconds=5) as (_, client):
        node = NodeProcess(tmp_path / "a", free_port())
        node.settings = (
            *(f"server={client.url}", "name=a"),
            *("engine.name=tests.e2e.dying_engine:Dying", "+engine.dies_in_call=1"),
        )
        await node.start()
        assert node.process is not None
        await client.submit(request)
        await node.process.wait()
        records = tmp_path / "a" / "state"
        if elsewhere:
            node = NodeProcess(tmp_path / "b", free_port())
        node.settings = (f"server={client.url}", f"name={'b' if elsewhere else 'a'}", f"records={records}")
        try:
            await node.start()
            yield client
        finally:
            await node.kill()


async def episodes_of(client: RolloutClient, task_id: str) -> tuple[Episode, list[Episode]]:
    """Return the accepted episode of a task with one sample, and the excluded ones."""
    state = await client.wait(task_id)
    assert (state.status, state.usable) == (TaskStatus.COMPLETED, 1)
    (accepted,) = [episode async for episode in client.episodes(task_id)]
    return accepted, [episode async for episode in client.episodes(task_id, excluded=True)]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_killed_nodes_session_goes_on_and_samples_each_call_once(tmp_path: Path, elsewhere: bool) -> None:
    async with after_a_death(tmp_path, task(agent=TWO_CALLS), elsewhere=elsewhere) as client:
        accepted, _ = await episodes_of(client, "t")
    session, fidelity = accepted.session, accepted.trajectory.fidelity
    assert (session.attempt, session.node) == (1, "b" if elsewhere else "a")
    assert session.timing.replay is not None
    (journal,) = (tmp_path / "a" / "state" / "sessions").glob("*.0/calls.jsonl")
    delivered = [call for call in read_journal(journal) if call.outcome == "delivered"]
    calls = {call.call_id: call for call in read_calls(accepted)}
    assert len(delivered) == 1
    replayed = calls[delivered[0].call_id].replayed
    assert replayed is not None
    assert replayed.owned
    assert sum(call.replayed is None for call in calls.values()) == 1, "the engine answered the second call alone"
    assert fidelity.trainable_tokens == sum(len(call.response_ids) for call in calls.values())


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_session_goes_on_where_its_node_is_gone_with_its_disk(tmp_path: Path, deaths: int) -> None:
    """Each node that dies has sent its journal to the server; the second one had gone on with the first one's."""
    need_bubblewrap()
    async with rollout_server(tmp_path, lease_seconds=5) as (service, client):
        await client.submit(task(agent=TWO_CALLS))
        for attempt in range(deaths):
            node = NodeProcess(tmp_path / f"n{attempt}", free_port())
            waits = f"+engine.dies_in_call={int(not attempt)}", "+engine.waits=true"
            node.settings = (
                *(f"server={client.url}", f"name=n{attempt}"),
                *("engine.name=tests.e2e.dying_engine:Dying", *waits),
            )
            await node.start()
            async with asyncio.timeout(120):
                while not _delivered(service.store.journals.directory, attempt):  # noqa: ASYNC110 - a file tells no events
                    await asyncio.sleep(0.05)
            await node.kill()
            shutil.rmtree(tmp_path / f"n{attempt}" / "state")
        node = NodeProcess(tmp_path / "last", free_port())
        node.settings = (f"server={client.url}", "name=last")
        try:
            await node.start()
            accepted, _ = await episodes_of(client, "t")
        finally:
            await node.kill()
        assert (accepted.session.attempt, accepted.session.node) == (deaths, "last")
        assert [call.replayed is not None for call in read_calls(accepted)] == [True, False]
        fidelity = accepted.trajectory.fidelity
        assert fidelity.trainable_tokens == fidelity.sampled_tokens
        await asyncio.to_thread(service.store.journals.keep_only, ())
        assert not service.store.journals.of(accepted.session.session_id)


async def test_a_node_sends_journals_of_its_own_sessions_only(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (service, client):
        state = await client.submit(task())
        ids = [state.sessions[0].session_id, "unknown"]
        pieces = [JournalPiece(session_id=session_id, attempt=0, lines="{}\n", manifest="{}") for session_id in ids]
        assert not (await service.journals("n", Journals(pieces=pieces))).sizes
        assert not service.store.journals.directory.exists()


def _delivered(journals: Path, attempt: int) -> bool:
    """Return whether the server has a delivered call of an attempt."""
    calls = [call for path in journals.glob(f"*/{attempt}/calls.jsonl") for call in read_journal(path)]
    return any(call.outcome == "delivered" for call in calls)


async def test_a_session_that_cannot_go_on_begins_again(tmp_path: Path) -> None:
    async with after_a_death(tmp_path, task(agent=NEVER_THE_SAME)) as client:
        accepted, excluded = await episodes_of(client, "t")
        kinds = {e.session.attempt: e.session.failure.kind for e in excluded if e.session.failure is not None}
    assert kinds == {0: "interrupted", 1: "diverged"}
    assert accepted.session.attempt == 2
    assert accepted.request.start_from is None


async def test_a_task_may_ask_to_begin_again(tmp_path: Path) -> None:
    async with after_a_death(tmp_path, task(agent=TWO_CALLS, retries=Retries(resume=False))) as client:
        accepted, _ = await episodes_of(client, "t")
    assert accepted.session.attempt == 1
    assert all(call.replayed is None for call in read_calls(accepted))
