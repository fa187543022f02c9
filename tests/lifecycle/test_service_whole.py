"""The whole service with real nodes, sandboxes and captured calls: by the command line, and over a node's death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from polar_gym.client import RolloutClient
from polar_gym.protocol import TaskStatus
from polar_gym.schema import Episode, Status
from polar_gym.service import server as server_module
from tests.lifecycle.nodes import NodeProcess, node_here
from tests.lifecycle.server_process import ENVIRONMENT, server_process
from tests.lifecycle.service_fixtures import SERVICE_KEY, rollout_server
from tests.support.processes import POLAR_GYM, free_port
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task

SCRIPTS = "engine.scripts=[{commands: [], final_message: All done.}]"


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


async def command(*arguments: str, stdin: bytes | None = None) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *POLAR_GYM,
        *arguments,
        env={**ENVIRONMENT, "COLUMNS": "200"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(stdin), 90)
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_cluster_local_serves_the_command_line(tmp_path: Path) -> None:
    requests = [task(task_id=f"t{number}", num_samples=2) for number in range(2)]
    lines = b"\n".join(request.to_json() for request in requests)
    output = tmp_path / "episodes.jsonl"
    async with server_process(tmp_path / "state", SCRIPTS, "runtime=bubblewrap") as server:
        at = ("--server", server.url)
        code, out = await command("submit", "-", *at, "--output", str(output), stdin=lines)
        assert code == 0, out
        episodes = [Episode.from_json(line) for line in output.read_bytes().splitlines()]
        assert sorted(episode.session.task_id for episode in episodes) == ["t0", "t0", "t1", "t1"]
        assert all(episode.reward == 1.0 and episode.trajectory.fidelity.exact for episode in episodes)
        assert all(episode.trajectory.fidelity.trainable_tokens for episode in episodes)
        (code, shown), (_, nodes), (again, ids), (_, wrong) = await asyncio.gather(
            command("status", "t0", "--json", *at),
            command("status", *at),
            command("submit", "-", *at, stdin=lines),
            command("status", "nobody", *at),
        )
        assert orjson.loads(shown)["usable"] == 2
        assert "local" in nodes
        assert (again, ids.split()) == (0, ["t0", "t1"]), "the same again is the same task"
        assert "task_id='nobody': there is no such task" in wrong
        assert (await command("cancel", "t0", *at))[1].strip() == "t0 had ended before: COMPLETED"
        assert await server.stop() == 0


async def test_a_task_ends_whose_episode_the_server_refuses_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The episode was sent again every 30 seconds, and the task never ended."""
    monkeypatch.setattr(server_module, "MAX_EPISODE_BYTES", 8000)
    async with (
        rollout_server(tmp_path / "server") as (_, client),
        node_here(tmp_path / "node", server=client.url),
    ):
        await client.submit(task(task_id="t", agent=asking("print('x' * 8000); ask()")))
        async with asyncio.timeout(60):
            state = await client.wait("t")
        (episode,) = [each async for each in client.episodes("t")]
    assert (state.status, state.usable) == (TaskStatus.FAILED, 0)
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "gateway_error"
    assert "answered 413" in episode.session.failure.message
    assert "one without a trajectory is" in caplog.text


async def test_a_killed_gateways_sessions_finish_on_another_node(tmp_path: Path) -> None:
    """The node that died comes back, salvages what it had captured, and that is kept as excluded."""
    settings = ("cluster=none", "lease_seconds=2")
    async with (
        server_process(tmp_path / "state", *settings) as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
    ):
        joined = (f"server={server.url}", "pools.run=2")
        slow = NodeProcess(tmp_path / "slow", free_port(), (*joined, "name=slow"), delay_seconds=600)
        quick = NodeProcess(tmp_path / "quick", free_port(), (*joined, "name=quick"))
        try:
            await slow.start()
            await client.submit(task(num_samples=2))
            events = client.events("t")
            running = 0
            while running < 2:
                event = await anext(events)
                running += event.kind == "session.status" and event.data["status"] == "RUNNING"
            await asyncio.gather(slow.kill(), quick.start())
            state = await asyncio.wait_for(client.wait("t"), 60)
            assert (state.status, state.usable, state.failures) == (TaskStatus.COMPLETED, 2, {})
            assert {(session.node, session.attempt) for session in state.sessions} == {("quick", 1)}
            await slow.start()
            excluded: list[Episode] = []
            async with asyncio.timeout(60):
                while len(excluded) < 4:  # what comes after the task's end is told by no event
                    await asyncio.sleep(0.1)
                    excluded = [episode async for episode in client.episodes("t", excluded=True)]
            salvaged = [episode for episode in excluded if episode.session.attempt == 0]
            assert {episode.session.status for episode in salvaged} == {Status.INTERRUPTED}
            assert all(episode.reward is None and episode.trajectory.fidelity.exact for episode in salvaged)
        finally:
            await asyncio.gather(slow.kill(), quick.kill())
