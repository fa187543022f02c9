"""A completion as a `GenerateContentResponse`, whole or as events.

Thoughts and text go out as they come. Function calls go out at the end. Their arguments are an object, which cannot be
sent in pieces, and an answer with a broken call must hold no calls at all (see `_calls`).

`responseId` and the ids of function calls name the model call. So does the signature, which is on the first function
call, or on the last text of an answer with thoughts. It carries the thoughts: clients hand it back, and drop them.
"""

from __future__ import annotations

from typing import Any

from polar_gym.chat import ChatRequest, Completion, Delta, ids
from polar_gym.providers.google.contents import signature
from polar_gym.providers.http import sse
from polar_gym.providers.json_text import parsed

Part = dict[str, Any]


def render(request: ChatRequest, completion: Completion, call_id: str) -> dict[str, Any]:
    """Return the whole answer."""
    message = completion.message
    said = [*_thought(message.get("reasoning")), *_text(message.get("content"))]
    return _last(request, completion, call_id, said)


class Stream:
    """The answer as events, each a whole response object. The last one has the finish reason and the usage."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._request, self._call_id = request, call_id

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def feed(self, delta: Delta) -> bytes:
        parts = [*_thought(delta.reasoning), *_text(delta.content)]
        return b"".join(sse(_response(self._request, self._call_id, {"content": _content([part])})) for part in parts)

    def end(self, completion: Completion) -> bytes:
        return sse(_last(self._request, completion, self._call_id, []))


def _thought(reasoning: str | None) -> list[Part]:
    return [{"text": reasoning, "thought": True}] if reasoning else []


def _text(content: str | None) -> list[Part]:
    return [{"text": content}] if content else []


def _content(parts: list[Part]) -> dict[str, Any]:
    return {"parts": parts, "role": "model"}


def _response(request: ChatRequest, call_id: str, candidate: dict[str, Any]) -> dict[str, Any]:
    return {"candidates": [candidate | {"index": 0}], "modelVersion": request.model, "responseId": f"resp_{call_id}"}


def _last(request: ChatRequest, completion: Completion, call_id: str, said: list[Part]) -> dict[str, Any]:
    """Return the part of the answer that was not sent yet, with the reason of its end.

    A content without parts makes clients throw a whole turn away, so the content always has a part.
    """
    calls, ending = _calls(completion, call_id)
    parts = [*said, *calls]
    if not calls and not (parts and "thought" not in parts[-1]):
        parts.append({"text": ""})
    reasoning = completion.message.get("reasoning") or ""
    if calls or reasoning:
        (calls[0] if calls else parts[-1])["thoughtSignature"] = signature(call_id, reasoning)
    prompt, answer = len(completion.prompt_ids), len(completion.response_ids)
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": answer, "totalTokenCount": prompt + answer}
    return _response(request, call_id, {"content": _content(parts), **ending}) | {"usageMetadata": usage}


def _calls(completion: Completion, call_id: str) -> tuple[list[Part], dict[str, str]]:
    """Return the function calls, and the fields that say how the answer ended.

    Arguments that are not a JSON object cannot be said in this format, and nothing is made up in their place. As with
    Google's models, the answer has no call then. It ends with MALFORMED_FUNCTION_CALL, or with MAX_TOKENS where it was
    cut off.
    """
    cut = completion.finish_reason == "length"
    parts = []
    for index, call in enumerate(completion.message.get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        args = _object(arguments)
        if args is None and cut:
            return [], {"finishReason": "MAX_TOKENS"}
        if args is None:
            return [], {
                "finishReason": "MALFORMED_FUNCTION_CALL",
                "finishMessage": f"Malformed function call: {name}({arguments})",
            }
        parts.append({"functionCall": {"id": ids.tool_call(call_id, index), "name": name, "args": args}})
    return parts, {"finishReason": "MAX_TOKENS" if cut else "STOP"}


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the arguments as an object that can be sent, or None. Blank text and `null` mean no arguments."""
    if arguments.strip() in ("", "null"):
        return {}
    args = parsed(arguments)
    return args if isinstance(args, dict) else None
