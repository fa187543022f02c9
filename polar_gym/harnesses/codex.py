"""Codex, over Responses.

Codex does not know our model's name, so it uses its default prompt and tools. This is the default profile, with the
context length set by configuration keys. Only the lean profile brings a model catalog entry, because only an entry can
replace the prompt. Plug-ins, apps and web search are off in both profiles: they need the network, which a sandbox does
not have, and their requests outlive the run.

The instruction comes by stdin (`-`), where neither its length nor a leading `-` matters. Standard output is the final
message; standard error is the transcript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_gym.harnesses import LEAN_PROMPT, Harness, Launch, LaunchContext, mcp

_KEY_VARIABLE = "POLAR_GYM_API_KEY"


def launch(context: LaunchContext) -> Launch:
    home = f"{context.home}/.codex"
    lean = context.spec.profile == "lean"
    catalog = f"{home}/catalog.json"
    settings = _settings(context) | (_LEAN_SETTINGS | {"model_catalog_json": catalog} if lean else {})
    # Dotted keys with strings, numbers and booleans, which TOML writes as JSON does.
    files = {f"{home}/config.toml": "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())}
    if lean:
        files[catalog] = json.dumps({"models": [_lean_model(context)]}, indent=2)
    flags = ["--ephemeral", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--color", "never"]
    return Launch(
        argv=[*context.executable, "exec", *flags, "-"],
        environment={"CODEX_HOME": home, _KEY_VARIABLE: context.api_key},
        files=files,
        stdin=context.instruction.encode(),
    )


def _settings(context: LaunchContext) -> dict[str, Any]:
    provider = "model_providers.gateway"
    return {
        "model": context.spec.model_name,
        "model_provider": "gateway",
        "model_context_window": context.context_length,
        "model_auto_compact_token_limit": _compaction_limit(context),
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "analytics.enabled": False,
        "feedback.enabled": False,
        "features.plugins": False,
        "features.remote_plugin": False,
        "features.apps": False,
        f"{provider}.name": "gateway",
        f"{provider}.base_url": f"{context.base_url}/v1",
        f"{provider}.env_key": _KEY_VARIABLE,
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": 1_800_000,
        **(_mcp(context.mcp_url) if context.mcp_url else {}),
    }


def _mcp(url: str) -> dict[str, Any]:
    server = f"mcp_servers.{mcp.SERVER}"
    return {
        f"{server}.url": url,
        f"{server}.bearer_token_env_var": _KEY_VARIABLE,
        f"{server}.tool_timeout_sec": mcp.PATIENCE_SECONDS,
        f"{server}.required": True,
    }


def _compaction_limit(context: LaunchContext) -> int:
    """Return the number of tokens at which Codex compacts.

    The default of 90% leaves no space for one more answer in a small context. An answer that is cut off would end the
    run with an error.
    """
    room = min(context.spec.max_output_tokens, context.context_length // 4)
    return min(context.context_length * 9 // 10, context.context_length - room)


_LEAN_SETTINGS: dict[str, Any] = {
    "skills.include_instructions": False,
    "skills.bundled.enabled": False,
    "features.multi_agent": False,
    "features.goals": False,
    "features.hooks": False,
    "features.memories": False,
    "features.shell_snapshot": False,
    "features.view_image": False,
}


def _lean_model(context: LaunchContext) -> dict[str, Any]:
    """Return a catalog entry with the fields that Codex requires, our prompt, and the shell as the only way to edit."""
    name = context.spec.model_name
    return {
        "slug": name,
        "display_name": name,
        "base_instructions": LEAN_PROMPT,
        "context_window": context.context_length,
        "shell_type": "unified_exec",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "input_modalities": ["text"],
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "supported_in_api": True,
        "visibility": "list",
        "priority": 0,
        "experimental_supported_tools": [],
    }


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return the thread and the kind of a request, which Codex names in headers."""
    named = {key.lower(): value for key, value in headers.items()}
    hints = {"thread": named["thread-id"]} if "thread-id" in named else {}
    purpose = _purpose(named.get("x-codex-turn-metadata"))
    if purpose == "compaction":
        hints["kind"] = "compaction"
    elif "x-openai-subagent" in named:
        hints["kind"] = "subagent"
    elif purpose not in (None, "turn"):
        hints["kind"] = "auxiliary"
    return hints


def _purpose(metadata: str | None) -> str | None:
    """Return `request_kind` of the metadata header. None: the header is absent or has an unknown form."""
    try:
        known = json.loads(metadata or "{}")
    except (ValueError, RecursionError):
        return None
    return known.get("request_kind") if isinstance(known, dict) else None


HARNESS = Harness(
    npm_package="@openai/codex",
    version="0.169.0",
    # The package's own program, bin/codex.js, only starts these; node is a seventh of a small session's CPU.
    native_programs={
        "x86_64": "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        "aarch64": "@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex",
    },
    launch=launch,
    volatile={"date": r"<current_date>[^<\n]+"},
    handles={"agent": r'"agent_id":"([0-9a-f-]{36})"'},
    notice=r'<subagent_notification>\n\{"agent_path":"[^"\n]+","status":[^\n]+\}\n</subagent_notification>',
    classify=classify,
    project_settings=(".codex/skills", ".agents/skills"),  # it trusts the workspace with nothing else
    lean_project_settings=(),
    mcp_prefix=f"mcp__{mcp.SERVER}__",
    # Codex's idle timer is reset by an event with data, of any type, and not by a comment.
    keep_alive=b'event: keepalive\ndata: {"type":"keepalive"}\n\n',
)
