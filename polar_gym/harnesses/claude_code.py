"""Claude Code, over Anthropic Messages.

Claude Code chooses its behaviour by the model's name. For a name that it does not know, such as our default, it uses
its newest prompt, and system messages in mid-conversation. For a name that begins with `claude-` it uses the prompt and
the limits of that model, and ignores the context length that is set here.

Web search and web fetch are off in both profiles: they need Anthropic's servers and the network, which a sandbox does
not have. The lean profile keeps the shell and three tools for files, and ignores the repository's settings and its
CLAUDE.md. The instruction comes by stdin, where neither its length nor a leading `-` or `/` matters. Standard output is
the final message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_gym.harnesses import Harness, Launch, LaunchContext, mcp, objects

_HOUR_MS = 3_600_000

_RESERVE = 13_000
"""Claude Code compacts when fewer tokens than this are left of the context, after the space for one answer."""


def launch(context: LaunchContext) -> Launch:
    model = context.spec.model_name
    profile = _LEAN if context.spec.profile == "lean" else _DEFAULT
    servers = f"{context.home}/.polar-gym/mcp.json"
    tools = ["--mcp-config", servers] if context.mcp_url else []
    return Launch(
        argv=[*context.executable, "-p", "--dangerously-skip-permissions", "--model", model, *profile, *tools],
        environment={
            **_QUIET,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            "CLAUDE_CONFIG_DIR": f"{context.home}/.claude",
            **_limits(context),
            **(_MCP if context.mcp_url else {}),
        },
        files={servers: json.dumps({"mcpServers": {mcp.SERVER: _server(context)}})} if context.mcp_url else {},
        stdin=context.instruction.encode(),
    )


def _server(context: LaunchContext) -> dict[str, Any]:
    return {"type": "http", "url": context.mcp_url, "headers": mcp.headers(context)}


_DEFAULT = ("--disallowedTools", "WebSearch,WebFetch")

_LEAN = (
    *("--tools", "Bash,Read,Edit,Write", "--disable-slash-commands", "--strict-mcp-config"),
    *("--setting-sources", "user"),  # else the repository's settings could deny tools, and set our variables
)

_QUIET = {
    "IS_SANDBOX": "1",  # without it, root may not skip permissions
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",  # no later session could use the memory
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "DISABLE_PROMPT_CACHING": "1",  # the markers of the cache move through the history from turn to turn
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS // 2),  # with this setting, pings keep it waiting
    "API_TIMEOUT_MS": str(_HOUR_MS),
}


_MCP = {
    "MCP_CONNECTION_NONBLOCKING": "0",  # else its first request may come before it knows the tools
    "MCP_TIMEOUT": str(_HOUR_MS // 12),
    "MCP_TOOL_TIMEOUT": str(mcp.PATIENCE_SECONDS * 1000),
    "ENABLE_TOOL_SEARCH": "false",  # it would keep the tools from the model until the model asks for them
}
"""Variables of a session whose environment has tools."""


def _limits(context: LaunchContext) -> dict[str, str]:
    """Return the variables that set the lengths of context and answer, and the window for compaction.

    Claude Code compacts by itself only if it is told the window. In a small context it would then compact at every
    turn, because its prompt alone fills the remaining context. There it is not told the window: it compacts when the
    proxy answers that the prompt is too long.
    """
    length = context.context_length
    answer = min(context.spec.max_output_tokens, length // 4)
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(length), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(answer)}
    if length - answer - _RESERVE >= length // 2:
        limits["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(max(length, 100_000))  # it takes no less, and caps it itself
    return limits


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return the thread and the kind of a request.

    Sub-agents name themselves in a header. The last message of a compaction ends with the task to summarize. A request
    without tools of the harness is not an agent's turn: titles, quota checks, web searches.
    """
    named = {key.lower(): value for key, value in headers.items()}
    agent, session = named.get("x-claude-code-agent-id"), named.get("x-claude-code-session-id")
    hints = {"thread": thread} if (thread := agent or session) else {}
    if _compacts(body.get("messages")):
        hints["kind"] = "compaction"
    elif agent:
        hints["kind"] = "subagent"
    elif not any("input_schema" in tool for tool in objects(body.get("tools"))):
        hints["kind"] = "auxiliary"
    return hints


def _compacts(messages: object) -> bool:
    content = next(reversed(objects(messages)), {}).get("content")
    text = next(reversed(objects(content)), {"text": content}).get("text")
    return isinstance(text, str) and text.startswith("CRITICAL: Respond with TEXT ONLY") and "summary" in text


HARNESS = Harness(
    npm_package="@anthropic-ai/claude-code",
    version="2.1.197",
    native_programs={
        "x86_64": "@anthropic-ai/claude-code-linux-x64/claude",
        "aarch64": "@anthropic-ai/claude-code-linux-arm64/claude",
    },
    launch=launch,
    volatile={
        "date": r"Today's date is [^\n]+",
        "transcript": r"read the full transcript at: /[^\s\\]+\.jsonl",  # after a compaction
    },
    handles={"agent": r"agentId: (\w+)"},
    told_today_by="bun",
    classify=classify,
    project_settings=(
        *(".claude/settings.json", ".claude/settings.local.json", ".claude/agents", ".claude/commands"),
        *(".claude/skills", ".claude/workflows", ".mcp.json"),
    ),
    lean_project_settings=(),
    mcp_prefix=f"mcp__{mcp.SERVER}__",
)
