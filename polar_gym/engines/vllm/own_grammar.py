"""Finds out whether a vLLM holds answers to a grammar that no request asks for.

A vLLM does so with `--tool-strict-level function`, by default with some tool-call parsers (GLM-4.7's), and with
Mistral's own tokenizers even where there are no tools. Logprobs under a grammar are not the policy's. `/render` shows
the request to the server's engine, of the chat route and of `generate` alike; the route needs `--enable-scale-out`.
"""

from __future__ import annotations

import logging

from polar_gym.engines import EngineError
from polar_gym.engines.http import Body, Http
from polar_gym.engines.vllm.generate import RENDER, STAND_IN
from polar_gym.schema import OwnGrammar, ToolDefinition

log = logging.getLogger(__name__)

TOOL: ToolDefinition = {
    "type": "function",
    "function": {"name": "ping", "parameters": {"type": "object", "properties": {"host": {"type": "string"}}}},
}
"""An ordinary tool. It is sent without `tool_choice`, which vLLM takes for `auto`: harnesses send one or the other."""

CURE = (
    "start vLLM without --tool-strict-level function or parameter, and with a tool-call parser that has no grammar by "
    "default (GLM-4.7's and Mistral's have one)"
)


async def own_grammar(http: Http, model: str) -> OwnGrammar:
    """Return which calls the server holds to a grammar of its own. Raises `EngineError` where it cannot be asked."""
    body: Body = {"model": model, "messages": STAND_IN}
    if _has_grammar(await http.post(RENDER, body)):
        return "all"
    return "tools" if _has_grammar(await http.post(RENDER, body | {"tools": [TOOL]})) else "none"


def _has_grammar(rendered: Body) -> bool:
    parameters = rendered.get("sampling_params") if isinstance(rendered, dict) else None
    if not isinstance(parameters, dict):
        raise EngineError(404, f"{RENDER} answers in an unknown form")
    return bool(parameters.get("structured_outputs"))


def warn_of_own_grammar(url: str, found: OwnGrammar) -> None:
    if found != "none":
        held = "every call" if found == "all" else "every call with tools"
        log.warning(
            "%s holds %s to a grammar of its own: none of them is trained on (sampling_mismatch), unless "
            "builder.train_on_sampling_mismatch=true; %s",
            url,
            held,
            CURE,
        )


def warn_of_unknown_grammar(url: str, why: str) -> None:
    log.warning(
        "%s: whether it holds tool calls to a grammar of its own is not known (%s). Make sure that it does not: tokens "
        "sampled under one would be trained on",
        url,
        why,
    )
