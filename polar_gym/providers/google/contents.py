"""The contents of a Google request as chat messages.

The model's answers come back as `model` contents. Consecutive ones are one assistant turn, however many chunks a client
keeps it in, unless they name different model calls. The results of tools come back as `functionResponse` parts of the
next content. Clients wrap the output of a program as `{"output": <text>}`: a result with this key alone becomes that
text, and any other result becomes its JSON.

Ids are optional in this format. A call without an id is known by the signature that left with it (`output`). Else it
gets an id by its number in the conversation, which later requests repeat. A result without an id, or with an id that no
call has (one that the client made), belongs to the first unanswered call of its function.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from polar_gym.chat import ids
from polar_gym.chat.messages import canonical_json
from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import optional, required, shown
from polar_gym.providers.google.json import base64_at, message_at, messages_at
from polar_gym.providers.messages import in_call_order, left_out, plain, renumbered
from polar_gym.schema import Message

_NOT_HERE = {
    "fileData": "files are not stored here; send the bytes as `inlineData`",
    "executableCode": "code is not executed here; leave the part out",
    "codeExecutionResult": "code is not executed here; leave the part out",
    "toolCall": "Google's own tools are not executed here; leave the part out",
    "toolResponse": "Google's own tools are not executed here; leave the part out",
}

_DATA = ("text", "inlineData", "functionCall", "functionResponse", *_NOT_HERE)
"""A part has one of these fields. A part with none of them (a signature alone) has no content."""

_MEDIA = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def messages_of(body: dict[str, Any]) -> tuple[list[Message], dict[int, str]]:
    """Return `systemInstruction` and `contents` as chat messages, and their `ChatRequest.origins`. Raises
    `BadRequestError` that names the wrong part."""
    conversation = _Conversation()
    contents = body.get("contents")
    if isinstance(contents, str):
        body = {**body, "contents": {"parts": [{"text": contents}]}}
    for path, content in messages_at(body, "contents"):
        role = optional(content, "role", str, path) or "user"
        parts = messages_at(content, "parts", path)
        if role == "model":
            conversation.add_answer(parts)
        elif role in ("user", "function"):
            conversation.add_input(parts)
        else:
            raise BadRequestError(f"{path}.role", f"{shown(role)} is not a role; use user or model")
    if not conversation.messages:
        raise BadRequestError("contents", "is empty; send at least one content with a part")
    system = _system(body)
    leading: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = in_call_order([*leading, *conversation.messages])
    return messages, renumbered(conversation.origins(), conversation.messages, messages)


def _system(body: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    instruction = body.get("systemInstruction")
    if instruction is None or isinstance(instruction, str):
        return instruction
    content = message_at(body, "systemInstruction")
    if "parts" not in content and "text" in content:
        content = {"parts": [content]}
    parts = [
        _said(part, path, media=False) for path, part in _telling(messages_at(content, "parts", "systemInstruction"))
    ]
    return plain(parts) if parts else None


def _telling(parts: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts that have content. Raises `BadRequestError` where the content of one cannot be passed on."""
    for path, part in parts:
        kinds = [kind for kind in _DATA if part.get(kind) is not None]
        if len(kinds) > 1:
            raise BadRequestError(path, f"has {' and '.join(kinds)}; send one of them in each part")
        for kind, why in _NOT_HERE.items():
            if kind in kinds:
                raise BadRequestError(f"{path}.{kind}", f"is not supported: {why}")
        if kinds:
            yield path, part


def _said(part: dict[str, Any], path: str, *, media: bool) -> dict[str, Any]:
    """Return a text or media part as a part of chat content."""
    if part.get("text") is not None:
        return {"type": "text", "text": required(part, "text", str, path)}
    if part.get("inlineData") is None or not media:
        kind = next(kind for kind in _DATA if part.get(kind) is not None)
        raise BadRequestError(f"{path}.{kind}", "does not belong here; send text" + (" or inlineData" if media else ""))
    blob = message_at(part, "inlineData", path)
    mime = required(blob, "mimeType", str, f"{path}.inlineData")
    if (kind := _MEDIA.get(mime.partition("/")[0])) is None:
        return left_out(mime)  # Gemini CLI sends each PDF that the policy reads
    return {"type": kind, kind: {"url": f"data:{mime};base64,{base64_at(blob, 'data', f'{path}.inlineData')}"}}


class _Conversation:
    """Collects messages; knows which assistant turn is still open and which of its calls are not answered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: _Turn | None = None
        self._turns: dict[int, _Turn] = {}
        """Index of an assistant message -> its turn."""
        self._ids: set[str] = set()
        """The ids of all calls so far."""
        self._unanswered: list[dict[str, Any]] = []
        """Calls that were made since the last results."""
        self._unnamed = 0
        """How many calls and results without an id were given one here."""

    def origins(self) -> dict[int, str]:
        """Return the index of an assistant message -> the call that a part of the message names."""
        return {index: turn.origin for index, turn in self._turns.items() if turn.origin is not None}

    def add_answer(self, parts: list[tuple[str, dict[str, Any]]]) -> None:
        # Gemini CLI hands an empty text that is signed back as its signature alone.
        signed = [(path, {"text": "", **part} if part.keys() == {"thoughtSignature"} else part) for path, part in parts]
        for path, part in _telling(signed):
            self._model_part(part, path)
        if self._turn is None:  # an empty content is still a turn
            self._open()

    def _model_part(self, part: dict[str, Any], path: str) -> None:
        call = message_at(part, "functionCall", path)
        id_ = optional(call, "id", str, f"{path}.functionCall")
        carried = _carried(part, path)
        origin = carried[0] if carried else ids.call_of(id_ or "")
        turn = self._turn
        if turn is None or (origin is not None and turn.origin not in (None, origin)):
            turn = self._open()
        turn.origin = turn.origin or origin
        if carried and carried[1]:  # exact: wins over the thoughts that a client shows or drops
            turn.message["reasoning"], turn.exact = carried[1], True
        if part.get("functionCall") is not None:
            self._call(turn, call, id_, f"{path}.functionCall")
        elif optional(part, "thought", bool, path):
            turn.think(required(part, "text", str, path))
        elif text := _said(part, path, media=False)["text"]:
            turn.message["content"] = (turn.message["content"] or "") + text

    def _call(self, turn: _Turn, call: dict[str, Any], id_: str | None, path: str) -> None:
        name = required(call, "name", str, path)
        arguments = canonical_json(optional(call, "args", dict, path) or {})
        calls = turn.message.setdefault("tool_calls", [])
        if id_ is None:
            id_ = ids.tool_call(turn.origin, len(calls)) if turn.origin else self._given_id()
        entry = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(entry)
        self._unanswered.append(entry)
        self._ids.add(id_)

    def add_input(self, parts: list[tuple[str, dict[str, Any]]]) -> None:
        """Add a user's content. Its results come first: they must follow their calls, wherever in the content a client
        puts them."""
        given = list(_telling(parts))
        for path, part in given:
            if part.get("functionResponse") is not None:
                self._result(message_at(part, "functionResponse", path), f"{path}.functionResponse")
        rest = [_said(part, path, media=True) for path, part in given if part.get("functionResponse") is None]
        if rest:
            self.messages.append({"role": "user", "content": plain(rest)})
        self._turn = None

    def _result(self, result: dict[str, Any], path: str) -> None:
        id_ = self._answered_id(required(result, "name", str, path), optional(result, "id", str, path))
        self._unanswered = [call for call in self._unanswered if call["id"] != id_]
        response = optional(result, "response", dict, path) or {}
        printed = response["output"] if set(response) == {"output"} else None
        text = printed if isinstance(printed, str) else canonical_json(response)
        media = [_said(part, part_path, media=True) for part_path, part in _telling(messages_at(result, "parts", path))]
        content = plain([{"type": "text", "text": text}, *media])
        self.messages.append({"role": "tool", "tool_call_id": id_, "content": content})

    def _answered_id(self, name: str, id_: str | None) -> str:
        if id_ in self._ids:
            return id_
        of_that_name = (call["id"] for call in self._unanswered if call["function"]["name"] == name)
        return next(of_that_name, None) or id_ or self._given_id()

    def _open(self) -> _Turn:
        if self._turn is None:
            self._unanswered = []
        self._turn = self._turns[len(self.messages)] = _Turn()
        self.messages.append(self._turn.message)
        return self._turn

    def _given_id(self) -> str:
        self._unnamed += 1
        return f"unnamed-{self._unnamed}"


class _Turn:
    """One assistant message in the making."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": None}
        self.origin: str | None = None
        """The model call of this turn, as soon as a part names one."""
        self.exact = False
        """Whether the reasoning is the one that a signature carries."""

    def think(self, text: str) -> None:
        if text and not self.exact:
            self.message["reasoning"] = self.message.get("reasoning", "") + text


def signature(call_id: str, reasoning: str) -> str:
    """Return a `thoughtSignature` that names the call and carries its reasoning, in base64 because the field is
    bytes."""
    return base64.b64encode(ids.carrier(call_id, 0, reasoning).encode()).decode()


def _carried(part: dict[str, Any], path: str) -> tuple[str, str] | None:
    """Return (call id, reasoning) of a part's signature, or None where the part has no signature made here."""
    if optional(part, "thoughtSignature", str, path) is None:
        return None
    try:
        return ids.carried(base64.b64decode(base64_at(part, "thoughtSignature", path), validate=True).decode())
    except ValueError:
        return None
