"""vLLM's second path, token in and token out: render, generate, derender (`--enable-scale-out`).

`render` turns a chat request into a request to the engine: ids, sampling parameters, the grammar of a forced tool.
`generate` samples, and says which weights sampled which token. Chat says so only from vLLM 0.33 on. `derender` gives
the sampled ids to the tool and reasoning parsers. A spliced prompt takes the place of the rendered ids. The messages
are then not read, and a short conversation takes their place: nothing depends on how chat treats ids.

`derender` decodes all ids that it is given, while chat leaves out the text that ended the answer. For that reason the
stop token is not given to it, and a stop string is cut off here. The finish reason is also set here, as chat names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from polar_gym.chat import Completion
from polar_gym.engines import EngineError
from polar_gym.engines.context_length import no_space
from polar_gym.engines.http import Body, Http
from polar_gym.engines.openai_form import message_of
from polar_gym.engines.vllm.prompt_echo import Sent
from polar_gym.engines.vllm.stream import GENERATE, StreamedAnswer, ask
from polar_gym.schema import Message, ReplayRecord, ToolDefinition

log = logging.getLogger(__name__)

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"

STAND_IN: list[Message] = [{"role": "user", "content": "Hello."}]
"""Rendered in place of messages whose ids are known: grammar and parameters do not depend on the messages."""


async def answer_by_ids(
    http: Http,
    body: Body,
    max_model_len: int,
    answer: StreamedAnswer,
    abort: str | None,
    *,
    headers: Mapping[str, str],
    now: Callable[[], Body] = dict,
    routed_positions: int = 0,
    alone: bool = True,
) -> None:
    """Give `answer` the ids of an answer to a chat request as they come, and then its text. Raises `EngineError`.

    `headers`, `now`: of the request that samples (`ask`). `routed_positions`: at how many of the prompt's ids the
    routed experts are known, and not told again. `alone`: an answer that the parsers fail to read is plain text.
    """
    if answer.sent is None:
        asked = await http.post(RENDER, body)
    else:
        if len(answer.sent.ids) >= max_model_len:
            raise no_space(max_model_len)
        asked = await http.post(RENDER, body | {"messages": STAND_IN})
        _put_prompt(asked, answer.sent, body.get("max_tokens"), max_model_len)
    asked["sampling_params"]["stream_interval"] = body.get("stream_interval")
    if routed_positions:
        asked["sampling_params"]["routed_experts_prompt_start"] = routed_positions
    await ask(http, GENERATE, asked | {"return_token_ids": True}, answer, abort, headers, now)
    reason = answer.finish_reason
    if reason in ("stop", "length"):
        message = message_of(await read_message(http, body, answer, "always" if alone else "refused"))
        answer.say(message, finish_reason(body, message, reason))


def _put_prompt(asked: Body, prompt: Sent, max_tokens: int | None, max_model_len: int) -> None:
    space = max_model_len - len(prompt.ids)
    asked["token_ids"] = prompt.field
    asked["sampling_params"]["max_tokens"] = space if max_tokens is None else min(max_tokens, space)
    if not asked["reasoning_ended"]:
        asked["reasoning_ended"] = None  # the engine finds the value from the ids


AsText = Literal["always", "refused", "never"]
"""When an answer is plain text that the server's parsers do not read: also where they fail; where they refuse, as with
a lone surrogate in a tool call's JSON; or never, because the answer has another reading."""


async def read_message(http: Http, body: Body, answer: StreamedAnswer, as_text: AsText) -> Message:
    """Return the message that the server's parsers read from the ids of a whole answer. Raises `EngineError`."""
    stop = answer.stop_sequence
    shown = answer.response_ids[:-1] if answer.finish_reason != "length" and stop is None else answer.response_ids
    if not shown:
        return {"content": ""}
    choice = {"index": 0, "token_ids": shown, "finish_reason": "length" if answer.finish_reason == "length" else "stop"}
    told = {"prompt_token_ids": answer.prompt_ids, "choices": [choice]}
    asked = {"model": body["model"], "generate_response": told, "chat_request": body}
    try:
        message = (await http.post(DERENDER, asked))["choices"][0]["message"]
    except EngineError as error:
        fails = as_text == "always" and error.kind == "server"
        refused = as_text != "never" and 400 <= error.status < 500
        if not (fails or refused):
            raise
        if fails:
            log.warning("an answer could not be read, and is passed on as plain text: %s", error.message)
        message = {"content": (await http.post("/detokenize", {"model": body["model"], "tokens": shown}))["prompt"]}
    return _cut_at(message, stop) if stop else message


def uncertain_call(completion: Completion) -> bool:
    """Return whether the answer was cut off and holds tool calls, or holds one whose arguments are no JSON object."""
    calls = completion.message.get("tool_calls") or []
    if calls and completion.finish_reason == "length":
        return True
    for call in calls:
        try:
            if not isinstance(orjson.loads(call["function"]["arguments"]), dict):
                return True
        except orjson.JSONDecodeError:
            return True
    return False


def lacks_call(completion: Completion, tools: Sequence[ToolDefinition]) -> bool:
    """Return whether tools were offered and a whole answer has no call, or one without an argument that its tool
    requires. Some of vLLM's parsers lose calls or arguments of which several tokens come at once (its issues 31501,
    48347 and 55082), and none of these where they read the whole answer."""
    calls = [call["function"] for call in completion.message.get("tool_calls") or []]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if not calls:
        return bool(tools) and completion.finish_reason == "stop"
    return any(not {*_required(schemas.get(call["name"]))} <= orjson.loads(call["arguments"]).keys() for call in calls)


def _required(schema: Any) -> list[str]:
    """Return the arguments that a tool's schema requires; harnesses may send any JSON as a schema."""
    names = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


async def read_again(
    http: Http, body: Body, answer: StreamedAnswer, completion: Completion, as_text: AsText
) -> Completion:
    """Return an answer with the message that the server's parsers read from all of its ids. While ids come, the parsers
    tell of a call before they know that it is broken, or that its arguments stand before its name."""
    message = message_of(await read_message(http, body, answer, as_text))
    ended = "length" if completion.finish_reason == "length" else "stop"
    return replace(completion, message=message, finish_reason=finish_reason(body, message, ended))


def _cut_at(message: dict[str, Any], stop: str) -> Message:
    """Return the message without the stop string and the text after it. Sampling ended at its first occurrence, so the
    string is in one part only, or in none where it is in a tool call's JSON."""
    for part in ("reasoning", "content"):
        before, found, _ = (message.get(part) or "").partition(stop)
        if found:
            return {**message, part: before}
    return message


def finish_reason(body: Body, message: Message, reason: str) -> str:
    tool_choice = body.get("tool_choice")
    if isinstance(tool_choice, dict):
        return reason
    called = reason == "stop" if tool_choice == "required" else bool(message.get("tool_calls"))
    return "tool_calls" if called else reason


async def unusable(
    http: Http, body: Body, prompt_ids: NDArray[np.int32], max_model_len: int, records: Collection[ReplayRecord]
) -> str | None:
    """Return why this path cannot be used, or None where it can. Raises `EngineError` where the server is at fault, or
    does not give the wanted records."""
    answer = StreamedAnswer(http, lambda _: None, Sent(prompt_ids), records)
    try:
        await answer_by_ids(http, body, max_model_len, answer, None, headers={}, alone=False)
    except EngineError as error:
        if not 400 <= error.status < 500:
            raise
        return f"{error.status}: {error.message}"
    echoed = answer.completion({}).prompt_ids.tolist()
    return None if echoed == prompt_ids.tolist() else f"it answered for the prompt {echoed}"
