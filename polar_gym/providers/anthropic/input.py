"""The messages of a Messages request as chat messages.

The blocks of an assistant's message become one chat message. The blocks of a user's message become several: each tool
result is a separate message. Results come first, as Anthropic asks of its clients, because nothing may stand between a
call and its result. One text block and a plain string are the same, because Claude Code turns the one into the other
when its cache marker moves on. System messages in mid-conversation stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polar_gym.chat import ids
from polar_gym.chat.messages import canonical_json
from polar_gym.providers import BadRequestError
from polar_gym.providers.anthropic.output import UNPARSED, utf16_length
from polar_gym.providers.fields import objects, optional, required, shown
from polar_gym.providers.messages import arranged, left_out, plain, renumbered
from polar_gym.schema import Message

Block = dict[str, Any]
Content = str | list[Block]

TOOL_ERROR = "[tool error]\n"
"""Begins the text of a tool result with `is_error` in chat form."""

_BILLING = "x-anthropic-billing-header:"


def messages_of(body: dict[str, Any]) -> tuple[list[Message], dict[int, str]]:
    """Return `system` and `messages` as chat messages, and their `ChatRequest.origins`. Raises `BadRequestError` that
    names the wrong block."""
    required(body, "messages", list)
    messages: list[Message] = []
    origins: dict[int, str] = {}
    if system := _system(body):
        messages.append({"role": "system", "content": system})
    conversation = objects(body, "messages")
    if not conversation:
        raise BadRequestError("messages", "is empty; send at least one message")
    for path, message in conversation:
        role = required(message, "role", str, path)
        if role not in _ROLES:
            raise BadRequestError(f"{path}.role", f"{shown(role)} is not a role; use {', '.join(_ROLES)}")
        if role == "assistant" and (origin := _origin(message, path)):
            origins[len(messages)] = origin
        messages += _ROLES[role](message, path)
    if conversation[-1][1]["role"] == "assistant":
        raise BadRequestError(
            "messages",
            "the last one is the assistant's: answers cannot be begun for the model; end with a user message",
        )
    merged = arranged(messages)
    return merged, renumbered(origins, messages, merged)


def _system(body: dict[str, Any]) -> str:
    """Return the text of the system blocks, with blank lines between them and without the billing block."""
    if isinstance(body.get("system"), str):
        return body["system"]
    texts = [_text(block, path)["text"] for path, block in objects(body, "system")]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _blocks(container: dict[str, Any], path: str) -> list[tuple[str, Block]]:
    """Return `content` as blocks, each with its path."""
    content = container.get("content")
    if isinstance(content, str):
        return [(f"{path}.content", {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise BadRequestError(f"{path}.content", f"expected a string or a list of blocks, got {shown(content)}")
    return objects(container, "content", path)


# A user's blocks ------------------------------------------------------------------------------------------------------


def _user(message: dict[str, Any], path: str) -> list[Message]:
    """Return the tool results, then the user's other blocks."""
    results: list[Message] = []
    parts: list[Block] = []
    for block_path, block in _blocks(message, path):
        if required(block, "type", str, block_path) == "tool_result":
            results.append(_tool_result(block, block_path))
        else:
            parts.append(_part(block, block_path))
    if not results and not parts:
        raise BadRequestError(f"{path}.content", "is empty; send at least one block")
    return [*results, {"role": "user", "content": plain(parts)}] if parts else results


def _tool_result(block: Block, path: str) -> Message:
    tool_call_id = required(block, "tool_use_id", str, path)
    parts = [] if block.get("content") is None else [_part(inner, at) for at, inner in _blocks(block, path)]
    content = plain(parts) if parts else ""
    if optional(block, "is_error", bool, path):
        content = TOOL_ERROR + content if isinstance(content, str) else [_as_text(TOOL_ERROR), *content]
    return {"role": "tool", "tool_call_id": tool_call_id, "content": content}


def _as_text(text: str) -> Block:
    return {"type": "text", "text": text}


def _part(block: Block, path: str) -> Block:
    """Return a block of a user's message or of a tool result as a chat content part."""
    kind = required(block, "type", str, path)
    if kind not in _PARTS:
        raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported here; use {', '.join(_PARTS)}")
    return _PARTS[kind](block, path)


def _text(block: Block, path: str) -> Block:
    if required(block, "type", str, path) != "text":
        raise BadRequestError(f"{path}.type", f"{shown(block['type'])} is not supported here; use text")
    return _as_text(required(block, "text", str, path))


def _image(block: Block, path: str) -> Block:
    source, path = required(block, "source", dict, path), f"{path}.source"
    kind = required(source, "type", str, path)
    if kind == "url":
        url = required(source, "url", str, path)
    elif kind == "base64":
        url = f"data:{required(source, 'media_type', str, path)};base64,{required(source, 'data', str, path)}"
    else:
        raise BadRequestError(
            f"{path}.type", f"{shown(kind)} is not supported: files are not stored; use base64 or url"
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Block, path: str) -> Block:
    """Return a document's title, context and text, with blank lines between. Claude Code sends each PDF that the policy
    reads."""
    headings = [optional(block, key, str, path) for key in ("title", "context")]
    source, path = required(block, "source", dict, path), f"{path}.source"
    kind = required(source, "type", str, path)
    if kind == "text":
        texts = [required(source, "data", str, path)]
    elif kind == "content":
        texts = [_text(inner, at)["text"] for at, inner in _blocks(source, path)]
    elif kind == "base64":
        texts = [left_out(f"{required(source, 'media_type', str, path)} document")["text"]]
    else:
        raise BadRequestError(f"{path}.type", f"{shown(kind)} documents cannot be read here; send their text")
    return _as_text("\n\n".join([*(heading for heading in headings if heading), *texts]))


def _search_result(block: Block, path: str) -> Block:
    """Return a search result's title, source and text, with blank lines between."""
    headings = [required(block, key, str, path) for key in ("title", "source")]
    return _as_text("\n\n".join([*headings, *(_text(inner, at)["text"] for at, inner in _blocks(block, path))]))


def _tool_reference(block: Block, path: str) -> Block:
    """Return the name of a tool that a client's tool search found. The tool itself is among the request's tools."""
    return _as_text(required(block, "tool_name", str, path))


_PARTS: dict[str, Callable[[Block, str], Block]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


# An assistant's blocks ------------------------------------------------------------------------------------------------


def _assistant(message: dict[str, Any], path: str) -> list[Message]:
    texts: list[str] = []
    reasoning, origin = "", None
    calls: list[dict[str, Any]] = []
    for block_path, block in _blocks(message, path):
        kind = required(block, "type", str, block_path)
        if kind == "text":
            texts.append(required(block, "text", str, block_path))
        elif kind in ("thinking", "redacted_thinking"):
            before, (origin, thought) = origin, _thought(block, block_path)
            if thought:  # parts of one answer are joined as they were sampled
                reasoning += ("\n\n" if reasoning and (origin is None or origin != before) else "") + thought
        elif kind == "tool_use":
            calls.append(_tool_use(block, block_path))
        else:
            raise BadRequestError(
                f"{block_path}.type",
                f"{shown(kind)} is not supported: Anthropic's own tools are not executed here; leave the block out",
            )
    said: Message = {"role": "assistant", "content": "".join(texts) or None}
    if reasoning:
        said["reasoning"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return [said]


def _origin(message: dict[str, Any], path: str) -> str | None:
    """Return the call that the thinking of a turn names."""
    carriers = (_carried(block, at) for at, block in _blocks(message, path))
    return next((carried[0] for carried in carriers if carried), None)


def _carried(block: Block, path: str) -> tuple[str, str] | None:
    """Return (call id, text) of a thinking block that was made here."""
    key = {"thinking": "signature", "redacted_thinking": "data"}.get(required(block, "type", str, path))
    opaque = optional(block, key, str, path) if key else None
    return ids.carried(opaque) if opaque else None


def _thought(block: Block, path: str) -> tuple[str | None, str]:
    """Return (call id, text) of a thinking block; None: the block was not made here. The text that its carrier holds is
    exact, and so it wins over `thinking`. Thinking that another server redacted cannot be read."""
    if carried := _carried(block, path):
        return carried
    return None, "" if block["type"] == "redacted_thinking" else required(block, "thinking", str, path)


def _tool_use(block: Block, path: str) -> dict[str, Any]:
    call_id, name = required(block, "id", str, path), required(block, "name", str, path)
    given = block.get("input")
    if given is None:
        required(block, "input", dict, path)
    try:
        # Arguments may be JSON without being an object. The client tells the policy of this mistake, as of broken JSON.
        arguments = (_unparsed(given) if isinstance(given, dict) else None) or canonical_json(given)
    except RecursionError as error:
        raise BadRequestError(f"{path}.input", "is nested too deeply; send a flatter one") from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _unparsed(given: dict[str, Any]) -> str | None:
    """Return arguments that were not a JSON object, from the form in which they were handed out or in which Claude Code
    hands them back. None where they are an object, or where they come back cut (Claude Code keeps 2048 characters)."""
    unparsed = given.get(UNPARSED) if len(given) == 1 else None
    if not isinstance(unparsed, dict) or not isinstance(raw := unparsed.get("raw"), str):
        return None
    return raw if unparsed.get("len") == utf16_length(raw) else None


def _system_message(message: dict[str, Any], path: str) -> list[Message]:
    return [{"role": "system", "content": plain([_text(block, at) for at, block in _blocks(message, path)])}]


_ROLES: dict[str, Callable[[dict[str, Any], str], list[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system_message,
}
