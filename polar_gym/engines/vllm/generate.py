"""vLLM's second path, token in and token out: render, generate, derender (`--enable-scale-out`).

`render` makes of a chat request what the engine is asked for: ids, sampling parameters, the grammar of a forced tool.
`generate` samples, and says which weights sampled which token; chat says so only from vLLM 0.33 on. `derender` gives
the sampled ids to the tool and reasoning parsers. A spliced prompt takes the place of the rendered ids, and a short
conversation that of the messages, which nobody looks at then: nothing depends on what chat does with ids.

Derender decodes all the ids it is shown, while chat leaves out the text of what ended the answer: the stop token is not
shown to it, and a stop string is cut off here. The finish reason is named here too, as chat names it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.engines import EngineError
from polar_gym.engines.context_length import no_space
from polar_gym.engines.http import Body, Http
from polar_gym.engines.openai_form import stop_sequence
from polar_gym.schema import Message

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"

STAND_IN: list[Message] = [{"role": "user", "content": "Hello."}]
"""Rendered in place of messages whose ids are known: the grammar and the parameters do not depend on them."""


async def answer_by_ids(http: Http, body: Body, prompt_ids: NDArray[np.int32] | None, max_model_len: int) -> Body:
    """The answer to a chat request, in the form in which chat gives it. Raises `EngineError`."""
    if prompt_ids is None:
        asked = await http.post(RENDER, body)
    else:
        if len(prompt_ids) >= max_model_len:
            raise no_space(max_model_len)
        asked = await http.post(RENDER, body | {"messages": STAND_IN})
        _put_prompt(asked, prompt_ids, body.get("max_tokens"), max_model_len)
    generated = await http.post(GENERATE, asked | {"return_token_ids": True})
    choice = generated["choices"][0]
    message = await _message(http, body, generated, choice)
    return {
        "prompt_token_ids": generated.get("prompt_token_ids"),
        "choices": [{**choice, "message": message, "finish_reason": _finish_reason(body, message, choice)}],
    }


def _put_prompt(asked: Body, prompt_ids: NDArray[np.int32], max_tokens: int | None, max_model_len: int) -> None:
    space = max_model_len - len(prompt_ids)
    asked["token_ids"] = prompt_ids
    asked["sampling_params"]["max_tokens"] = space if max_tokens is None else min(max_tokens, space)
    if not asked["reasoning_ended"]:
        asked["reasoning_ended"] = None  # the engine finds out from the ids


async def _message(http: Http, body: Body, generated: Body, choice: Body) -> Message:
    stop = stop_sequence(choice)
    by_token = choice["finish_reason"] == "stop" and stop is None
    shown = choice["token_ids"][:-1] if by_token else choice["token_ids"]
    if not shown:
        return {"content": ""}
    parsed = {**generated, "choices": [{**choice, "token_ids": shown, "logprobs": None}]}
    asked = {"model": body["model"], "generate_response": parsed, "chat_request": body}
    message = (await http.post(DERENDER, asked))["choices"][0]["message"]
    return _cut_at(message, stop) if stop else message


def _cut_at(message: dict[str, Any], stop: str) -> Message:
    """Sampling ended at the first occurrence, so it is in one part only, and in a tool call's JSON in none."""
    for part in ("reasoning", "content"):
        before, found, _ = (message.get(part) or "").partition(stop)
        if found:
            return {**message, part: before}
    return message


def _finish_reason(body: Body, message: Message, choice: Body) -> str:
    tool_choice, reason = body.get("tool_choice"), choice["finish_reason"]
    if isinstance(tool_choice, dict):
        return reason
    called = reason == "stop" if tool_choice == "required" else bool(message.get("tool_calls"))
    return "tool_calls" if called else reason


async def unusable(http: Http, body: Body, prompt_ids: NDArray[np.int32], max_model_len: int) -> str | None:
    """Why this path cannot be used; None where it can. Raises `EngineError` where the server itself is at fault."""
    try:
        answer = await answer_by_ids(http, body, prompt_ids, max_model_len)
    except EngineError as error:
        if not 400 <= error.status < 500:
            raise
        return f"{error.status}: {error.message}"
    echoed = answer["prompt_token_ids"]
    return None if echoed == prompt_ids.tolist() else f"it answered for the prompt {echoed}"
