"""mini-SWE-agent: a loop around one tool, bash, over Chat Completions, without streaming.

The instruction comes in a file of its configuration, where neither its length nor a leading `-` matters. The agent ends
by a command that it is told, not by an answer without a call: such an answer is left out of the history, and the third
one in a row ends the run. Nothing of it compacts, delegates or speaks MCP. Standard output is a log of the run.
"""

from __future__ import annotations

import json
import re
from typing import Any

from polar_gym.harnesses import LEAN_PROMPT, Harness, Launch, LaunchContext

_PATIENCE_SECONDS = 3600

_ATTEMPTS = "5"
"""How often a request is made in vain, each time three times: for 20 s. By default its patience lasts four minutes."""

_END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_LEAN_TASK = f"{{{{task}}}}\n\nOnce the task is done, run this command alone: {_END}"


def launch(context: LaunchContext) -> Launch:
    home = f"{context.home}/.config/mini-swe-agent"
    config = f"{home}/gateway.yaml"
    return Launch(
        argv=[*context.executable, "--yolo", "--exit-immediately", "--config=mini.yaml", f"--config={config}"],
        environment={
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": home,
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": _ATTEMPTS,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices, at every start
        },
        files={config: _yaml(_settings(context))},
    )


def _settings(context: LaunchContext) -> dict[str, Any]:
    """Return the settings that differ from its `mini.yaml`."""
    generation = {
        "max_tokens": min(context.spec.max_output_tokens, context.context_length // 2),
        "timeout": _PATIENCE_SECONDS,
    }
    agent: dict[str, Any] = {"cost_limit": 0}
    if context.spec.profile == "lean":
        agent |= {"system_template": LEAN_PROMPT, "instance_template": _LEAN_TASK}
    return {
        "run": {"task": context.instruction},
        "agent": agent,
        "model": {"model_name": f"openai/{context.spec.model_name}", "model_kwargs": generation},
    }


def _yaml(settings: dict[str, Any]) -> str:
    """Return the settings as JSON with YAML's escapes: PyYAML does not join the two surrogates by which JSON escapes an
    emoji."""
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    return re.sub(r"[^\n -~]", lambda match: f"\\U{ord(match[0]):08x}", text)


HARNESS = Harness(
    pypi_package="mini-swe-agent",
    pypi_pins=["litellm==1.83.14"],  # newer ones need `mcp` for any tool, and do not ask for it
    version="2.4.6",
    script="mini",
    launch=launch,
    project_settings=("mini.yaml",),  # it looks for the configuration of this name there first
    ends_by=_END,
)
