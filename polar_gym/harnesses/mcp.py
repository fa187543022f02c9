"""The MCP server with an environment's tools, as the configurations of harnesses name it."""

from typing import Any

from polar_gym.harnesses import LaunchContext

SERVER = "gym"
"""The server's name in the configuration of every harness."""
PATIENCE_SECONDS = 3600
"""How long a harness waits for a tool of an environment, which the gateway ends much earlier."""


def headers(context: LaunchContext) -> dict[str, str]:
    """Return the headers of requests to `context.mcp_url`."""
    return {"Authorization": f"Bearer {context.api_key}"}


def gemini_server(context: LaunchContext) -> dict[str, Any]:
    """Return the server as Gemini CLI, and Qwen Code after it, are configured with one."""
    patience = PATIENCE_SECONDS * 1000
    return {"httpUrl": context.mcp_url, "headers": headers(context), "timeout": patience, "trust": True}
