"""vLLM's second path, token in and token out: render, generate, derender (`--enable-scale-out`).

`render` turns a chat request into a request to the engine: ids, sampling parameters, the grammar of a forced tool.
`generate` samples, and says which weights sampled which token. Chat says so only from vLLM 0.33 on. `derender` gives
the sampled ids to the tool and reasoning parsers. A spliced prompt takes the place of the rendered ids. The messages
are then not read, and a short conversation takes their place: nothing depends on how chat treats ids.

`derender` decodes all ids that it is given, while chat leaves out the text that ended the answer. For that reason the
stop token is not given to it, and a stop string is cut off here. The finish reason is also set here, as chat names it.
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
"""Rendered in place of messages whose ids are known: grammar and parameters do not depend on the messages."""


async def answer_by_ids(http: Http, body: Body, prompt_ids: NDArray[np.int32] | None, max_model_len: int) -> Body:
    """Return the answer to a chat request, in the form in which chat gives it. Raises `EngineError`."""
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
        asked["reasoning_ended"] = None  # the engine finds the value from the ids


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
    """Return the message without the stop string and the text after it. Sampling ended at its first occurrence, so the
    string is in one part only, or in none where it is in a tool call's JSON."""
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
    """Return why this path cannot be used, or None where it can. Raises `EngineError` where the server is at fault."""
    try:
        answer = await answer_by_ids(http, body, prompt_ids, max_model_len)
    except EngineError as error:
        if not 400 <= error.status < 500:
            raise
        return f"{error.status}: {error.message}"
    echoed = answer["prompt_token_ids"]
    return None if echoed == prompt_ids.tolist() else f"it answered for the prompt {echoed}"
