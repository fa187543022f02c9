"""Pi: a small harness with four tools (read, bash, edit, write), over Chat Completions.

Text mode, because in JSON mode it exits with 0 after an API error. The instruction comes by stdin, where neither its
length nor a leading `-` or `@` matters; Pi drops the blanks at its ends. Standard output is the final message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from polar_gym.harnesses import Harness, Launch, LaunchContext, system_prompt

_KEY_VARIABLE = "POLAR_GYM_API_KEY"

_SETTINGS = (".pi/settings.json", ".pi/SYSTEM.md", ".pi/APPEND_SYSTEM.md")
"""Files of a workspace that both profiles obey."""

_LEAN = ("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-context-files")


def launch(context: LaunchContext) -> Launch:
    config = f"{context.home}/.pi/agent"
    model, extension = context.spec.model_name, f"{context.home}/.polar-gym/mcp.js"
    profile = _LEAN if context.spec.profile == "lean" else ()
    return Launch(
        argv=[
            *context.executable,
            "-p",
            "--no-session",
            "--offline",
            "--provider",
            "gateway",
            "--model",
            model,
            *profile,
            *(["--extension", extension] if context.mcp_url else []),
        ],
        environment={
            _KEY_VARIABLE: context.api_key,
            "PI_CODING_AGENT_DIR": config,
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
        },
        files={
            f"{config}/models.json": json.dumps(_models(context), indent=2),
            f"{config}/settings.json": json.dumps(_settings(context), indent=2),
            **({extension: _MCP_CLIENT % {"url": json.dumps(context.mcp_url)}} if context.mcp_url else {}),
        },
        stdin=context.instruction.encode(),
    )


_MCP_CLIENT = """\
// Pi has no MCP client; extensions may bring tools. These are the tools of the session's environment.
const ask = async (method, params, signal) => {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${process.env.POLAR_GYM_API_KEY}` };
  const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method, params });
  const answer = await (await fetch(%(url)s, { method: "POST", headers, body, signal })).json();
  if (answer.error) throw new Error(answer.error.message);
  return answer.result;
};
export default async (pi) => {
  for (const { name, description, inputSchema } of (await ask("tools/list", {})).tools) {
    const execute = async (id, params, signal) => {
      const { content, isError } = await ask("tools/call", { name, arguments: params }, signal);
      if (isError) throw new Error(content[0].text);
      return { content, details: {} };
    };
    pi.registerTool({ name, label: name, description, parameters: inputSchema, execute });
  }
};
"""


def _models(context: LaunchContext) -> dict[str, object]:
    """Return one provider with one model. `compat` limits requests to fields that every engine understands."""
    compat = {
        "supportsDeveloperRole": False,
        "supportsReasoningEffort": False,
        "supportsStore": False,
        "maxTokensField": "max_tokens",
    }
    model = {
        "id": context.spec.model_name,
        "reasoning": True,
        "contextWindow": context.context_length,
        "maxTokens": min(context.spec.max_output_tokens, context.context_length // 2),
    }
    provider = {
        "baseUrl": f"{context.base_url}/v1",
        "api": "openai-completions",
        "apiKey": _KEY_VARIABLE,
        "compat": compat,
        "models": [model],
    }
    return {"providers": {"gateway": provider}}


def _settings(context: LaunchContext) -> dict[str, object]:
    """Return the settings of compaction, in proportion to the context.

    Pi compacts when a run ends with less than `reserveTokens` (16384 by default) left. In a context of that size this
    is always so, and the model call for the summary would be useless.
    """
    compaction = {
        "reserveTokens": min(16_384, context.context_length // 8),
        "keepRecentTokens": min(20_000, context.context_length // 4),
    }
    return {"compaction": compaction}


_SUMMARIZER = "You are a context summarization assistant."
"""The beginning of the system prompt of every compaction. All other requests of Pi are its agent's turns."""


def classify(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return `kind: compaction` for a request that has the summarizer's system prompt; Pi has no sub-agents."""
    return {"kind": "compaction"} if system_prompt(body).startswith(_SUMMARIZER) else {}


HARNESS = Harness(
    npm_package="@earendil-works/pi-coding-agent",
    version="0.74.2",
    script="dist/cli.js",
    launch=launch,
    volatile={"date": r"Current date: [^\n]+"},
    told_today_by="node",
    classify=classify,
    project_settings=(*_SETTINGS, ".pi/extensions", ".pi/prompts", ".pi/skills", ".agents/skills"),
    lean_project_settings=_SETTINGS,
    mcp_prefix="",
    broken_stream="end",  # an error event ends its run
)
