"""Gemini CLI, over Google's generateContent.

The instruction comes by stdin, where neither its length nor a leading `-` or `@` matters. Text mode, whose standard
output is the model's text; the exit code of a run that an API error ended is not 0 in any mode.

Updates, usage statistics and web tools are off in both profiles, because a sandbox has no network. Loop detection is
off too: it asks a model of another name, and stalls the run for minutes unless the answer is the JSON that it expects.
The tool that enters a mode in which nothing may be changed is off as well. The lean profile has our prompt and the
tools that work on files. A context size cannot be set, and in a run with one prompt the CLI never compacts. A run that
outgrows the engine's context ends with the error that names this cause.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_gym.harnesses import LEAN_PROMPT, Harness, Launch, LaunchContext, mcp, objects
from polar_gym.harnesses.node import frugal

_LEAN_TOOLS = ["run_shell_command", "read_file", "write_file", "replace"]

_WITHOUT = ["google_web_search", "web_fetch", "enter_plan_mode"]


def launch(context: LaunchContext) -> Launch:
    home = f"{context.home}/.gemini"
    environment = {
        "GEMINI_API_KEY": context.api_key,
        "GOOGLE_GEMINI_BASE_URL": context.base_url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "1",  # else a second process, started by the first one to give it more memory
    }
    files = {f"{home}/settings.json": json.dumps(_settings(context), indent=2)}
    if context.spec.profile == "lean":
        environment["GEMINI_SYSTEM_MD"] = f"{home}/system.md"
        files[f"{home}/system.md"] = LEAN_PROMPT
    argv = [*context.executable, "--yolo", "--skip-trust", "--model", context.spec.model_name]
    return frugal(Launch(argv=argv, environment=environment, files=files, stdin=context.instruction.encode()), context)


def _settings(context: LaunchContext) -> dict[str, Any]:
    answer = {"maxOutputTokens": min(context.spec.max_output_tokens, context.context_length // 2)}
    override = {"match": {"model": context.spec.model_name}, "modelConfig": {"generateContentConfig": answer}}
    core = [*_LEAN_TOOLS, *([f"mcp_{mcp.SERVER}_*"] if context.mcp_url else [])]
    lean = {"core": core} if context.spec.profile == "lean" else {}
    return {
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        # Without this setting, a base URL makes the CLI choose an authentication that it then refuses.
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "model": {"disableLoopDetection": True},
        "modelConfigs": {"customOverrides": [override]},
        "tools": {"exclude": _WITHOUT} | lean,
        "advanced": {"autoConfigureMemory": False},
        **({"mcpServers": {mcp.SERVER: mcp.gemini_server(context)}} if context.mcp_url else {}),
    }


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return the kind of a request, which the CLI does not name.

    Only a sub-agent has a tool to report with. A request without streaming is housekeeping: a summary of the history,
    or a question to a smaller model.
    """
    declared = (each for tool in objects(body.get("tools")) for each in objects(tool.get("functionDeclarations")))
    if any(each.get("name") == "complete_task" for each in declared):
        return {"kind": "subagent"}
    if body.get("stream") is not None:
        return {}
    if "<state_snapshot>" in json.dumps(body.get("systemInstruction")):
        return {"kind": "compaction"}
    return {"kind": "auxiliary"}


HARNESS = Harness(
    npm_package="@google/gemini-cli",
    version="0.61.0",
    script="bundle/gemini.js",
    launch=launch,
    volatile={"date": r"Today's date is [^\n]+"},
    told_today_by="node",
    classify=classify,
    project_settings=(
        *(".gemini/settings.json", ".gemini/.env", ".env"),
        *(".gemini/commands", ".gemini/skills", ".agents/skills"),
    ),
    mcp_prefix=f"mcp_{mcp.SERVER}_",
)
