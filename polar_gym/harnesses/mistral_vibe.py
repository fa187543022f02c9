"""Mistral Vibe, over Chat Completions, in its headless mode, which offers no sub-agents.

The instruction comes by stdin, where neither its length nor a leading `-` matters. Standard output is the final
message. Its system prompt cannot be replaced, so the lean profile only takes away the tools that can be taken away.
No MCP server is configured: it offers MCP tools only to programs that the model writes (`run_typescript`), so that the
answers hold no calls for a verifier that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from polar_gym.harnesses import Harness, Launch, LaunchContext, objects, system_prompt

_KEY_VARIABLE = "POLAR_GYM_API_KEY"

_PATIENCE_SECONDS = 3600

_LEAN_TOOLS = ("bash", "read_file", "write_file", "edit")


def launch(context: LaunchContext) -> Launch:
    home = f"{context.home}/.vibe"
    return Launch(
        argv=[
            *(*context.executable, "--prompt", "--auto-approve", "--trust"),
            *(f"--enabled-tools={tool}" for tool in _LEAN_TOOLS * (context.spec.profile == "lean")),
        ],
        environment={_KEY_VARIABLE: context.api_key, "VIBE_HOME": home},
        files={f"{home}/config.toml": _settings(context)},
        stdin=context.instruction.encode(),
    )


def _settings(context: LaunchContext) -> str:
    """Return the settings, without everything that would ask the network. It compacts at three quarters of the
    context, so that the rest always holds an answer of a quarter."""
    name, url = json.dumps(context.spec.model_name), json.dumps(f"{context.base_url}/v1")
    return f"""\
active_model = {name}
api_timeout = {_PATIENCE_SECONDS}
auto_compact_threshold = {context.context_length * 3 // 4}
enable_auto_update = false
enable_connectors = false
enable_notifications = false
enable_telemetry = false
enable_update_checks = false

[experiments]
enable = false

[session_logging]
generate_titles = false

[[providers]]
name = "gateway"
api_base = {url}
api_key_env_var = "{_KEY_VARIABLE}"

[[models]]
name = {name}
alias = {name}
provider = "gateway"
max_context_length = {context.context_length}
max_output_tokens = {min(context.spec.max_output_tokens, context.context_length // 4)}
"""


_SUMMARIZER = "You are a dedicated conversation summarizer."
"""The beginning of the system prompt of a compaction that reads a transcript."""
_CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION."
"""Stands in the last message of a compaction within the conversation."""


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return `kind: compaction` for a request that asks for a summary."""
    asked = str(next(reversed(objects(body.get("messages"))), {}).get("content"))
    return {"kind": "compaction"} if _CHECKPOINT in asked or system_prompt(body).startswith(_SUMMARIZER) else {}


HARNESS = Harness(
    pypi_package="mistral-vibe",
    version="3.0.2",
    script="vibe",
    launch=launch,
    classify=classify,
    project_settings=(
        *(".vibe/config.toml", ".vibe/hooks.toml", ".vibe/agents", ".vibe/plugins", ".vibe/prompts", ".vibe/skills"),
        *(".vibe/tools", ".agents/skills"),
    ),
)
