"""The tools of an environment as an MCP server: each message of a client and its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from polar_gym.evaluators import ToolAnswer
from polar_gym.gateway.proxy.mcp import VERSIONS, answer


class Echo:
    """An environment whose one tool says its arguments."""

    tools = ({"name": "echo", "description": "Says it.", "inputSchema": {"type": "object"}},)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        return ToolAnswer(f"{name} {json.dumps(arguments)}", failed="fail" in arguments)


async def said(method: str, params: Any = None, **fields: Any) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params, **fields}
    response = await answer(message, Echo())
    assert (response.status, response.content_type) == (200, "application/json")
    assert isinstance(response.body, bytes)
    given = json.loads(response.body)
    assert (given.pop("jsonrpc"), given.pop("id")) == ("2.0", message["id"])
    return given


async def test_a_client_begins_in_a_version_that_both_know() -> None:
    for asked, chosen in [(VERSIONS[1], VERSIONS[1]), ("1999-01-01", VERSIONS[0]), (["x"], VERSIONS[0])]:
        result = (await said("initialize", {"protocolVersion": asked, "capabilities": {}}))["result"]
        assert (result["protocolVersion"], result["capabilities"]) == (chosen, {"tools": {}})
    assert await said("ping", id="a") == {"result": {}}


@pytest.mark.parametrize("message", [{"method": "notifications/initialized"}, {"id": 1, "result": {}}], ids=str)
async def test_what_asks_for_nothing_is_accepted_without_an_answer(message: dict[str, Any]) -> None:
    response = await answer({"jsonrpc": "2.0", **message}, Echo())
    assert isinstance(response, web.Response)
    assert (response.status, response.body) == (202, None)


async def test_tools_are_listed_and_called() -> None:
    assert await said("tools/list") == {"result": {"tools": list(Echo.tools)}}
    for arguments, failed in [({"a": 1}, False), ({"fail": 1}, True), (None, False)]:
        result = (await said("tools/call", {"name": "echo", "arguments": arguments}))["result"]
        text = f"echo {json.dumps(arguments or {})}"
        assert result == {"content": [{"type": "text", "text": text}], "isError": failed}


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("tools/call", {"name": "verify", "arguments": {}}, -32602),
        ("tools/call", {"name": ["echo"], "arguments": {}}, -32602),
        ("tools/call", {"name": "echo", "arguments": "x"}, -32602),
        ("tools/call", "echo", -32602),
        ("resources/list", {}, -32601),
        (None, {}, -32601),
    ],
    ids=str,
)
async def test_other_requests_get_an_error(method: Any, params: Any, code: int) -> None:
    assert (await said(method, params))["error"]["code"] == code
