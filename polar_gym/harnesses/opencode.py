"""OpenCode, over Chat Completions.

Its npm package brings a native program for each kind of machine, in a separate package. We take the baseline one of the
two for x86-64: the same program for processors with and without AVX2.

The instruction comes by stdin: an argument that holds blanks would reach the model in quotation marks. Standard output
is the model's text; standard error is the transcript.

The default profile asks for a title first, as OpenCode does for its users; `classify` knows that call by its prompt.
The lean profile ignores the repository's settings and its AGENTS.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_gym.harnesses import LEAN_PROMPT, Harness, Launch, LaunchContext, mcp, system_prompt

_KEY_VARIABLE = "POLAR_GYM_API_KEY"

_PATIENCE_MILLISECONDS = 3_600_000

_LEAN_TOOLS = ("bash", "read", "write", "edit")

_PLUGIN_INSTALLED = {
    "package-lock.json": json.dumps({"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}),
    "node_modules/.keep": "",
}
"""Files that stop OpenCode from installing the package that plug-ins import, at every start, from the network."""


def launch(context: LaunchContext) -> Launch:
    home = f"{context.home}/.config/opencode"
    files = {"opencode.json": json.dumps(_settings(context), indent=2), **_PLUGIN_INSTALLED}
    return Launch(
        argv=[*context.executable, "run", "--auto", "--pure", f"--model=gateway/{context.spec.model_name}"],
        environment={
            _KEY_VARIABLE: context.api_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            **({"OPENCODE_DISABLE_PROJECT_CONFIG": "1"} if context.spec.profile == "lean" else {}),
        },
        files={f"{home}/{name}": text for name, text in files.items()},
        stdin=context.instruction.encode(),
    )


def _settings(context: LaunchContext) -> dict[str, Any]:
    model = f"gateway/{context.spec.model_name}"
    settings: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "provider": {"gateway": _provider(context)},
    }
    if context.spec.profile == "lean":
        settings["snapshot"] = False
        settings["agent"] = {"title": {"disable": True}, "build": {"prompt": LEAN_PROMPT}}
        settings["tools"] = {"*": False} | dict.fromkeys(_LEAN_TOOLS, True)
    if context.mcp_url:
        server = {"type": "remote", "url": context.mcp_url, "headers": mcp.headers(context), "oauth": False}
        settings["mcp"] = {mcp.SERVER: {**server, "timeout": mcp.PATIENCE_SECONDS * 1000}}
        settings.setdefault("tools", {})[f"{mcp.SERVER}_*"] = True
    return settings


def _provider(context: LaunchContext) -> dict[str, Any]:
    """Return the settings of the provider. OpenCode compacts when less than `output` is left of `context`."""
    name = context.spec.model_name
    output = min(context.spec.max_output_tokens, context.context_length // 4)
    return {
        "npm": "@ai-sdk/openai-compatible",
        "options": {
            "baseURL": f"{context.base_url}/v1",
            "apiKey": f"{{env:{_KEY_VARIABLE}}}",
            "timeout": _PATIENCE_MILLISECONDS,
            "headerTimeout": _PATIENCE_MILLISECONDS,
            "chunkTimeout": _PATIENCE_MILLISECONDS,
        },
        "models": {name: {"name": name, "limit": {"context": context.context_length, "output": output}}},
    }


_PURPOSES = {"You are a title generator.": "auxiliary", "You are a context summarization agent.": "compaction"}
"""Beginning of the system prompt of a side call -> its kind."""


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return the thread and the kind of a request.

    Headers name the session that asks, and its parent session if there is one. Prompts tell side calls.
    """
    named = {key.lower(): value for key, value in headers.items()}
    hints = {"thread": named["x-session-id"]} if "x-session-id" in named else {}
    kinds = (kind for opening, kind in _PURPOSES.items() if system_prompt(body).startswith(opening))
    if kind := next(kinds, "subagent" if "x-parent-session-id" in named else None):
        hints["kind"] = kind
    return hints


HARNESS = Harness(
    npm_package="opencode-ai",
    version="1.18.33",
    native_programs={
        "x86_64": "opencode-linux-x64-baseline/bin/opencode",
        "aarch64": "opencode-linux-arm64/bin/opencode",
    },
    launch=launch,
    volatile={
        "date": r"Today's date: [^\n]+",
        "output": r"Full output saved to: /\S+",  # of a cut tool result, which a compaction puts into user text
    },
    handles={"agent": r'<task id="(\w+)"'},
    classify=classify,
    project_settings=("opencode.json", "opencode.jsonc", ".opencode", ".claude/skills", ".agents/skills"),
    lean_project_settings=(),
    mcp_prefix=f"{mcp.SERVER}_",
)
