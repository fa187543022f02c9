"""The tools of a session's environment as an MCP server, over streamable HTTP without sessions and streams.

MCP: https://modelcontextprotocol.io/specification, sections Lifecycle, Transports and Tools.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from polar_gym.evaluators import Environment

MCP_PATH = "/mcp"
VERSIONS = ("2025-11-25", "2025-06-18", "2024-11-05")
"""The versions of the protocol, which do not differ in what is answered here. 2025-03-26 has batches."""
METHOD_NOT_FOUND, INVALID_PARAMS = -32601, -32602
"""Error codes of JSON-RPC."""


class _McpError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def answer(message: dict[str, Any], environment: Environment) -> web.Response:
    """Return the answer to one message of a client: the result of a request, nothing for a notification."""
    if "id" not in message or "method" not in message:
        return web.Response(status=202)
    envelope = {"jsonrpc": "2.0", "id": message["id"]}
    params = message.get("params")
    try:
        result = await _result(message["method"], params if isinstance(params, dict) else {}, environment)
    except _McpError as error:
        return web.json_response({**envelope, "error": {"code": error.code, "message": str(error)}})
    return web.json_response({**envelope, "result": result})


async def _result(method: Any, params: dict[str, Any], environment: Environment) -> dict[str, Any]:
    """Return the result of a request. Raises `_McpError`."""
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            return {
                "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "polar-gym", "version": "1"},
            }
        case "ping":
            return {}
        case "tools/list":
            return {"tools": list(environment.tools)}
        case "tools/call":
            name, arguments = params.get("name"), params.get("arguments") or {}
            if not isinstance(name, str) or name not in [tool["name"] for tool in environment.tools]:
                raise _McpError(INVALID_PARAMS, f"there is no tool {name!r}")
            if not isinstance(arguments, dict):
                raise _McpError(INVALID_PARAMS, "arguments must be an object")
            said = await environment.call(name, arguments)
            return {"content": [{"type": "text", "text": said.text}], "isError": said.failed}
    raise _McpError(METHOD_NOT_FOUND, f"there is no method {method!r}")
