"""Qwen Code, over Chat Completions.

Text mode, because in its JSON modes Qwen Code exits with 0 after an API error. The instruction comes by stdin, where
neither its length nor a leading `-` matters. Qwen Code adds an empty line to the instruction, and obeys the instruction
as a slash command if it begins with the name of one. Standard output is the final message.

Both profiles are without `tool_search` and the two tools that it would find, one of which needs the network.
`tool_search` adds tools in the middle of the list while a conversation runs, so that every later token would be new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_gym.harnesses import LEAN_PROMPT, Harness, Launch, LaunchContext, mcp
from polar_gym.harnesses.node import frugal

_PATIENCE_MILLISECONDS = 3_600_000

_FOUND_BY_SEARCH = ["tool_search", "web_fetch", "monitor"]

_LEAN_CORE = ["run_shell_command", "read_file", "write_file", "edit"]

_NOT_CORE = ["agent", "task_stop", "send_message", "skill", "ask_user_question", "exit_plan_mode"]
"""Tools that the list of core tools does not switch off."""


def launch(context: LaunchContext) -> Launch:
    lean = context.spec.profile == "lean"
    home = f"{context.home}/.qwen"
    launch = Launch(
        argv=[
            *context.executable,
            "--yolo",
            "--auth-type=openai",
            f"--model={context.spec.model_name}",
            *([f"--system-prompt={LEAN_PROMPT}"] if lean else []),
        ],
        environment={
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.api_key,
            "QWEN_HOME": home,
            "QWEN_CODE_NO_RELAUNCH": "true",  # saves one process of some 150 MB
        },
        files={f"{home}/settings.json": json.dumps(_settings(context, lean), indent=2)},
        stdin=context.instruction.encode(),
    )
    return frugal(launch, context)


def _settings(context: LaunchContext, lean: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "general": {
            "enableAutoUpdate": False,
            "chatRecording": False,  # it asks git for the branch, and waits, with each message
        },
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "tools": {"exclude": _FOUND_BY_SEARCH},
        "model": {"generationConfig": _generation(context)},
        # After a first answer without a tool call, an agent of Qwen Code's own would look for things to remember.
        "memory": {"enableManagedAutoMemory": False},
    }
    if context.mcp_url:
        settings["mcpServers"] = {mcp.SERVER: mcp.gemini_server(context)}
    if lean:
        settings["tools"] = {"core": _LEAN_CORE, "exclude": [*_FOUND_BY_SEARCH, *_NOT_CORE]}
    return settings


def _generation(context: LaunchContext) -> dict[str, Any]:
    """Return the settings of generation.

    Qwen Code compacts at 70% of the context, so the remaining context always holds an answer of a quarter. Without our
    `max_tokens`, Qwen Code would ask again for an answer that was cut off, with a `max_tokens` that it chooses.
    """
    return {
        "timeout": _PATIENCE_MILLISECONDS,
        "contextWindowSize": context.context_length,
        "samplingParams": {"max_tokens": min(context.spec.max_output_tokens, context.context_length // 4)},
    }


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return `kind: compaction` for a request without tools whose last message asks for a snapshot.

    Requests of sub-agents look like those of the main agent.
    """
    messages = body.get("messages")
    if not body.get("tools") and isinstance(messages, list) and messages and "<state_snapshot>" in str(messages[-1]):
        return {"kind": "compaction"}
    return {}


HARNESS = Harness(
    npm_package="@qwen-code/qwen-code",
    version="0.15.10",
    script="cli.js",
    launch=launch,
    volatile={"date": r"Today's date is [^\n]+"},
    told_today_by="node",
    classify=classify,
    project_settings=(
        *(".qwen/settings.json", ".qwen/.env", ".env", ".qwen/output-language.md"),
        *(".qwen/agents", ".qwen/commands", ".qwen/skills", ".agents/skills"),
    ),
    mcp_prefix=f"mcp__{mcp.SERVER}__",
    broken_stream="end",  # an error event ends its run
)
