"""Whole sessions on a resources server: its seed, its tools inside the sandbox, its verdict, and its failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar_gym.gateway.proxy.capture import MAX_TOOL_CALLS
from polar_gym.gateway.proxy.receiving import read_json
from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.schema import Episode, EvaluatorSpec, Status
from tests.support.requirements import need_bubblewrap
from tests.support.resources_server import Counting, counting, row
from tests.support.sessions import asking, node, running_session, task

MCP = """
def mcp(method, **params):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["POLAR_GYM_MCP_URL"]
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["result"]
def tool(name, **arguments): return mcp("tools/call", name=name, arguments=arguments)
"""


@pytest.fixture
async def server() -> AsyncIterator[Counting]:
    need_bubblewrap()
    async with counting() as server:
        yield server


def grading(server: Counting, expected: int) -> EvaluatorSpec:
    return EvaluatorSpec.model_validate({"name": "nemo_gym", "url": server.url, "row": row(expected)})


async def rollout(tmp_path: Path, server: Counting, lines: str, *expected: int) -> list[Episode]:
    """Run a session for each expected number, all at once."""
    requests = [task(agent=asking(f"{MCP}\nask()\n{lines}"), evaluator=grading(server, each)) for each in expected]
    async with node(tmp_path) as gateway:
        return await asyncio.gather(*map(gateway.rollout, requests))


async def test_parallel_sessions_have_their_own_state_in_the_server(tmp_path: Path, server: Counting) -> None:
    """Each counts to six; a shared session would make that nine or more."""
    lines = """
for _ in range(3): assert not tool("add", count=1)["isError"]
print(tool("total")["content"][0]["text"], [each["name"] for each in mcp("tools/list")["tools"]])
"""
    episodes = await rollout(tmp_path, server, lines, 6, 6, 7)
    assert [episode.reward for episode in episodes] == [1.0, 1.0, 0.0], [each.session.failure for each in episodes]
    assert sorted(server.totals.values()) == [6, 6, 6]
    for episode in episodes:
        assert episode.artifacts.stdout.strip() == "{\"total\": 6} ['add', 'total']"
        assert episode.artifacts.diff == ""


async def test_a_refused_tool_call_is_the_agents(tmp_path: Path, server: Counting) -> None:
    (episode,) = await rollout(tmp_path, server, 'print(json.dumps(tool("add", count="many")))', 3)
    told = json.loads(episode.artifacts.stdout)
    assert told["isError"]
    assert "an integer is needed" in told["content"][0]["text"]
    assert episode.reward == 1.0, "the server's state is as it was, and its verdict counts"


async def test_a_server_that_refuses_the_row_fails_the_session_before_its_sandbox(
    tmp_path: Path, server: Counting
) -> None:
    server.broken["/seed_session"] = (422, {"detail": "initial_count: missing"})
    (episode,) = await rollout(tmp_path, server, "", 6)
    assert (episode.reward, episode.trajectory.fidelity.calls) == (None, 0)
    failure = episode.session.failure
    assert failure is not None
    assert (failure.stage, failure.kind) == (Status.INITIALIZING, "evaluator_error")
    assert failure.message == f'{server.url}/seed_session answered 422: {{"detail": "initial_count: missing"}}'


async def test_only_the_session_itself_reaches_its_tools(
    tmp_path: Path, server: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = task(evaluator=grading(server, 6))
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with (
        running_session(node(tmp_path).engine, tmp_path, request) as (gateway, capture),
        aiohttp.ClientSession() as http,
    ):

        async def status(key: str, method: str = "POST", body: Any = message) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.request(method, f"{gateway.url}/mcp", json=body, headers=headers) as response:
                return response.status

        assert await status(capture.key) == 200
        assert await status(capture.key, "GET") == 405
        assert await status("pg-other") == 401
        assert await status(capture.key, body=[message]) == 400
        capture.running = False
        assert await status(capture.key) == 403

        async def ends_meanwhile(http: Any) -> dict[str, Any]:
            body = await read_json(http)
            capture.running = False
            return body

        monkeypatch.setattr("polar_gym.gateway.proxy.proxy.read_json", ends_meanwhile)
        capture.running = True
        assert await status(capture.key) == 403, "a tool was reached after the end of the session"


async def test_a_session_has_few_tool_calls_at_once(tmp_path: Path, server: Counting) -> None:
    """Guards against an agent that fills the gateway's memory with calls that wait for their turn."""
    server.slow = "/add"
    async with (
        running_session(node(tmp_path).engine, tmp_path, task(evaluator=grading(server, 6))) as (gateway, capture),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):
        assert capture.environment is not None
        await capture.environment.open()

        async def status() -> int:
            params = {"name": "add", "arguments": {"count": 1}}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            headers = {"Authorization": f"Bearer {capture.key}"}
            async with http.post(f"{gateway.url}/mcp", json=message, headers=headers) as response:
                return response.status

        calls = [group.create_task(status()) for _ in range(MAX_TOOL_CALLS + 1)]
        (first,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert first.result() == 429
        for call in calls:
            call.cancel()


async def test_a_tool_call_ends_with_its_session(tmp_path: Path, server: Counting) -> None:
    server.slow = "/add"
    requests = task(
        agent=asking(f'{MCP}\nask()\ntool("add", count=3)'), evaluator=grading(server, 3), timeout_seconds=3
    )
    async with node(tmp_path) as gateway:
        episode = await gateway.rollout(requests)
    assert (episode.session.truncated_by, episode.reward) == ("time", 1.0), episode.session.failure


async def test_an_agent_server_takes_rows_of_other_environments(tmp_path: Path, server: Counting) -> None:
    """The row that NeMo Gym's collector sends is the task; a row that cannot be one is masked."""
    settings = AgentSettings(
        polar={
            "harness": asking(f'{MCP}\nask()\ntool("add", count=3)').model_dump(exclude={"today"}),
            "runtime": "bubblewrap",
            "engine": {"name": "embedded", "scripts": [{"final_message": "Done."}]},
            "evaluator": {"name": "nemo_gym", "url": server.url},
        }
    )
    rollouts = Rollouts(settings)
    try:
        answer = await rollouts.run({**row(6), "_ng_task_index": 0})
        assert (answer["reward"], answer["mask_sample"]) == (1.0, False), answer["failure_reason"]
        assert answer["expected"] == 6
        assert "_ng_task_index" not in server.verified[0]
        refused = await rollouts.run({"responses_create_params": {"input": []}})
        assert (refused["mask_sample"], refused["failure_kind"]) == (True, "polar:invalid_row")
    finally:
        await rollouts.close()
