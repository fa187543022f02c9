"""A Responses `input` as chat messages.

Responses writes one assistant turn as several items (reasoning, message, calls), while chat has one message for it.
Items belong to one turn when they follow each other, and always when their ids name the same model call. Items that
name different calls are different turns, even when nothing stands between them: a client that was cut off keeps the
items that it had and asks again. Of those, text without an id cannot be told from the text of the next answer, and
joins it: that answer's continuation is then a break (`history`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polar_gym.chat import ids
from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import expect, objects, optional, required, shown
from polar_gym.providers.messages import arranged, file_left_out, plain, renumbered
from polar_gym.providers.openai_responses.tools import LOCAL_SHELL, flat_name, freeform_arguments, shell_arguments
from polar_gym.schema import Message

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def messages_of(body: dict[str, Any]) -> tuple[list[Message], dict[int, str]]:
    """Return `instructions` and `input` as chat messages, and their `ChatRequest.origins`. Raises `BadRequestError`
    that names the wrong item."""
    conversation = _Conversation()
    if instructions := optional(body, "instructions", str):
        conversation.say({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        conversation.say({"role": "user", "content": given})
    else:
        required(body, "input", list)
        for path, item in objects(body, "input"):
            _read(conversation, item, path)
    if not conversation.messages:
        raise BadRequestError("input", "is empty; send at least one item", code="empty_array")
    merged = arranged(conversation.messages)
    return merged, renumbered(conversation.origins, conversation.messages, merged)


class _Conversation:
    """Collects messages, and knows which assistant turn is still open."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: dict[int, str] = {}
        """Index of an assistant message -> the call that an id of its items names."""
        self._place: int | None = None
        """The index of the open turn."""
        self._parts: dict[tuple[int, str], str | None] = {}
        """(Index of an assistant message, `content` or `reasoning`) -> the call that the last such item names."""
        self._answered = False
        """Whether tool results of the open turn have come. Then only an item of the same call may still join it."""

    def say(self, message: Message) -> None:
        """Add a message that ends the open turn."""
        self.messages.append(message)
        self._place = None

    def answer(self, tool_call_id: str, content: str | list[dict[str, Any]]) -> None:
        self.messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": content})
        self._answered = True

    def turn(self, origin: str | None) -> Message:
        """Return the assistant message that an item of the model call `origin` (None: unknown) belongs to."""
        known = None if self._place is None else self.origins.get(self._place)
        same_call = origin is not None and origin == known
        may_join = same_call or not (self._answered or (origin and known))
        if self._place is None or not may_join:
            self._place, self._answered = len(self.messages), False
            self.messages.append({"role": "assistant", "content": None})
        if origin:
            self.origins.setdefault(self._place, origin)
        return self.messages[self._place]

    def joins(self, origin: str | None, part: str) -> bool:
        """Note that the open turn gets a part of an answer, and return whether the turn's last such part is of the same
        model call: then nothing that was not sampled may stand between them."""
        assert self._place is not None
        before = self._parts.get((self._place, part))
        self._parts[self._place, part] = origin
        return origin is not None and origin == before

    def call(self, item: dict[str, Any], path: str, name: str, arguments: str) -> None:
        """Add a tool call to its turn."""
        call_id = required(item, "call_id", str, path)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.turn(ids.call_of(call_id)).setdefault("tool_calls", []).append(call)


def _read(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    kind = optional(item, "type", str, path) or ("message" if "role" in item else None)
    if kind in _READERS:
        _READERS[kind](conversation, item, path)
    elif kind == "item_reference":
        raise BadRequestError(
            f"{path}.type", "'item_reference' is not supported: nothing is stored; send the item itself"
        )
    elif kind == "additional_tools":
        raise BadRequestError(f"{path}.type", "'additional_tools' is not supported; send them in the request's `tools`")
    else:
        raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported; use one of {', '.join(_READERS)}")


def _message(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    role = required(item, "role", str, path)
    if role == "assistant":
        content = _content(item, "content", path, media=False)
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        origin = ids.call_of(optional(item, "id", str, path) or "")
        turn, between = conversation.turn(origin), "" if conversation.joins(origin, "content") else "\n"
        turn["content"] = text if turn["content"] is None else f"{turn['content']}{between}{text}"
    elif role in ("system", "developer"):
        conversation.say({"role": "system", "content": _content(item, "content", path, media=False)})
    elif role == "user":
        conversation.say({"role": "user", "content": _content(item, "content", path, media=True)})
    else:
        raise BadRequestError(f"{path}.role", f"{shown(role)} is not a role; use system, developer, user or assistant")


def _reasoning(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    """Add the reasoning of an item to its turn. The text that a carrier in `encrypted_content` holds is exact, and so
    it wins over `content` and `summary`."""
    opaque = optional(item, "encrypted_content", str, path)
    carried = ids.carried(opaque) if opaque else None
    if carried is not None:
        origin, text = carried
    else:
        origin = ids.call_of(optional(item, "id", str, path) or "")
        parts = objects(item, "content", path) or objects(item, "summary", path)
        text = "\n\n".join(required(part, "text", str, part_path) for part_path, part in parts)
        if opaque and not text:
            raise BadRequestError(
                f"{path}.encrypted_content",
                f"{shown(opaque)} was not made here and the item has no text; leave the item out",
                code="invalid_encrypted_content",
            )
    if text:
        turn, between = conversation.turn(origin), "" if conversation.joins(origin, "reasoning") else "\n\n"
        turn["reasoning"] = f"{turn['reasoning']}{between}{text}" if "reasoning" in turn else text


def _tool_call(
    conversation: _Conversation, item: dict[str, Any], path: str, *, key: str, form: Callable[[str], str]
) -> None:
    name = flat_name(required(item, "name", str, path), optional(item, "namespace", str, path))
    conversation.call(item, path, name, form(required(item, key, str, path)))


def _local_shell_call(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    conversation.call(item, path, LOCAL_SHELL, shell_arguments(required(item, "action", dict, path)))


def _output(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    conversation.answer(required(item, "call_id", str, path), _content(item, "output", path, media=True))


def _local_shell_output(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    # OpenAI's own schema has the call's id in `id` here, and in `call_id` everywhere else.
    key = "call_id" if item.get("call_id") is not None else "id"
    conversation.answer(required(item, key, str, path), _content(item, "output", path, media=False))


def _agent_message(conversation: _Conversation, item: dict[str, Any], path: str) -> None:
    """Add a message from one agent to another. Its text names both.

    Codex takes what its policy wrote to the other agent for encrypted by the server, so `encrypted_content` is text.
    """
    parts = [
        _as_text(required(part, "encrypted_content", str, part_path))
        if part.get("type") == "encrypted_content"
        else _part(part, part_path, media=True)
        for part_path, part in objects(item, "content", path)
    ]
    if not parts:
        raise BadRequestError(f"{path}.content", "is empty; send at least one part")
    is_text = all(part["type"] == "text" for part in parts)
    conversation.say({"role": "user", "content": "".join(part["text"] for part in parts) if is_text else parts})


_READERS: dict[str, Callable[[_Conversation, dict[str, Any], str], None]] = {
    "message": _message,
    "agent_message": _agent_message,
    "reasoning": _reasoning,
    "function_call": partial(_tool_call, key="arguments", form=str),
    "function_call_output": _output,
    "custom_tool_call": partial(_tool_call, key="input", form=freeform_arguments),
    "custom_tool_call_output": _output,
    "local_shell_call": _local_shell_call,
    "local_shell_call_output": _local_shell_output,
}


def _content(item: dict[str, Any], key: str, path: str, *, media: bool) -> str | list[dict[str, Any]]:
    """Return an item's content: as a string where it is a single text, else as chat content parts."""
    content, field = item.get(key), f"{path}.{key}"
    if isinstance(content, str):
        return content
    parts = [
        _part(expect(part, dict, f"{field}[{i}]"), f"{field}[{i}]", media)
        for i, part in enumerate(required(item, key, list, path))
    ]
    return plain(parts)


def _as_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _part(part: dict[str, Any], path: str, media: bool) -> dict[str, Any]:
    kind = required(part, "type", str, path)
    if kind in _TEXT_PARTS:
        return _as_text(required(part, "text", str, path))
    if kind == "refusal":
        return _as_text(required(part, "refusal", str, path))
    if kind == "input_image" and media:
        if part.get("image_url") is None:
            raise BadRequestError(f"{path}.image_url", "is missing; send the image as a data URL, files are not stored")
        image = {"url": required(part, "image_url", str, path)}
        if detail := optional(part, "detail", str, path):
            image["detail"] = detail
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio" and media:
        if part.get("audio_url") is not None:  # Codex's form
            return {"type": "audio_url", "audio_url": {"url": required(part, "audio_url", str, path)}}
        return {"type": kind, kind: required(part, kind, dict, path)}
    if kind == "input_file" and media:
        return file_left_out(part, path)
    known = "input_text, output_text, input_image, input_audio, input_file" if media else "input_text, output_text"
    raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported here; use {known}")
