"""An answer as the events of a Responses stream.

Items come one after another: reasoning, message, tool calls. Each is opened by its first fragment and closed by the
first fragment of the next one. A client that reads only `response.output_item.done` therefore gets all items of the
answer, in order. Freeform and local shell calls are made from their whole arguments, and sent when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.providers.http import sse
from polar_gym.providers.openai_responses.output import (
    Item,
    call_item,
    finished,
    message_item,
    reasoning_item,
    response,
    surface_of,
)

Event = dict[str, Any]


@dataclass(slots=True)
class _OpenItem:
    """The item that grows at present."""

    key: tuple[str, int]
    """The item's kind, and its place among the answer's tool calls."""
    make: Callable[[str], Item]
    """Makes the item from its whole text."""
    opening: Item | None
    """The item as it was opened; None for an item that is sent when it is complete."""
    said: list[str] = field(default_factory=list)


class Events:
    """Numbered events, each with its name in the `event:` line and in `type`."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._request = request
        self._call_id = call_id
        self._numbered = 0
        self._items: list[Item] = []
        """The complete items."""
        self._open: _OpenItem | None = None

    def begin(self, prompt_tokens: int) -> bytes:
        started = response(self._request, self._call_id, "in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._send(*({"type": kind, "response": started} for kind in kinds))

    def feed(self, delta: Delta) -> bytes:
        sent = b""
        if delta.reasoning:
            sent += self._say(("reasoning", 0), delta.reasoning)
        if delta.content:
            sent += self._say(("message", 0), delta.content)
        for fragment in delta.tool_calls:
            function = fragment["function"]
            sent += self._say(("call", fragment["index"]), function.get("arguments") or "", function.get("name") or "")
        return sent

    def end(self, completion: Completion) -> bytes:
        sent = self._close(cut=completion.finish_reason == "length")
        whole = finished(self._request, completion, self._call_id, self._items)
        return sent + self._send({"type": f"response.{whole['status']}", "response": whole})

    def _say(self, key: tuple[str, int], text: str, name: str = "") -> bytes:
        """Return the events for more text of the open item, or for the first text of the next item."""
        sent = b""
        if self._open is None or self._open.key != key:
            sent = self._close()
            make = self._maker(key, len(self._items), name)
            told_whole = key[0] == "call" and surface_of(self._request, name)["kind"] != "function"
            self._open = _OpenItem(key, make, None if told_whole else make(""))
            if self._open.opening is not None:
                sent += self._send(*_opening(self._open.opening, len(self._items)))
        self._open.said.append(text)
        if self._open.opening is not None and text:
            sent += self._send(*_growth(self._open.opening, len(self._items), text))
        return sent

    def _maker(self, key: tuple[str, int], position: int, name: str) -> Callable[[str], Item]:
        kind, index = key
        if kind == "reasoning":
            return lambda text: reasoning_item(self._call_id, position, text)
        if kind == "message":
            return lambda text: message_item(self._call_id, position, text)
        return lambda text: call_item(self._request, self._call_id, index, name, text)

    def _close(self, *, cut: bool = False) -> bytes:
        if self._open is None:
            return b""
        item, position = self._open.make("".join(self._open.said)), len(self._items)
        events = []
        if self._open.opening is None:
            text = item.get("input") or item.get("arguments") or ""
            events += [*_opening(item, position), *_growth(item, position, text)]
        events += _closing(item, position)
        if cut:
            item["status"] = "incomplete"
        self._items.append(item)
        self._open = None
        return self._send(*events, {"type": "response.output_item.done", "output_index": position, "item": item})

    def _send(self, *events: Event) -> bytes:
        sent = []
        for event in events:
            sent.append(sse({**event, "sequence_number": self._numbered}, event["type"]))
            self._numbered += 1
        return b"".join(sent)


# The events of one item -----------------------------------------------------------------------------------------------

_DELTAS: dict[str, Event] = {
    "reasoning": {"type": "response.reasoning_summary_text.delta", "summary_index": 0},
    "message": {"type": "response.output_text.delta", "content_index": 0, "logprobs": []},
    "function_call": {"type": "response.function_call_arguments.delta"},
    "custom_tool_call": {"type": "response.custom_tool_call_input.delta"},
}


def _opening(item: Item, position: int) -> list[Event]:
    """Return the events that open an item, without its content."""
    empty = {key: type(item[key])() for key in ("summary", "content", "arguments", "input") if key in item}
    in_progress = {"status": "in_progress"} if "status" in item else {}
    events: list[Event] = [{"type": "response.output_item.added", "item": {**item, **empty, **in_progress}}]
    if item["type"] == "reasoning":
        part = {**item["summary"][0], "text": ""}
        events.append({"type": "response.reasoning_summary_part.added", "summary_index": 0, "part": part})
    elif item["type"] == "message":
        part = {**item["content"][0], "text": ""}
        events.append({"type": "response.content_part.added", "content_index": 0, "part": part})
    return _placed(events, item, position)


def _growth(item: Item, position: int, text: str) -> list[Event]:
    delta = _DELTAS.get(item["type"])
    return _placed([{**delta, "delta": text}], item, position) if delta else []


def _closing(item: Item, position: int) -> list[Event]:
    events: list[Event] = []
    if item["type"] == "reasoning":
        part, stem = item["summary"][0], "response.reasoning_summary"
        events.append({"type": f"{stem}_text.done", "summary_index": 0, "text": part["text"]})
        events.append({"type": f"{stem}_part.done", "summary_index": 0, "part": part})
    elif item["type"] == "message":
        part = item["content"][0]
        said = {"text": part["text"], "logprobs": []}
        events.append({"type": "response.output_text.done", "content_index": 0, **said})
        events.append({"type": "response.content_part.done", "content_index": 0, "part": part})
    elif item["type"] == "function_call":
        named = {"name": item["name"], "arguments": item["arguments"]}
        events.append({"type": "response.function_call_arguments.done", **named})
    elif item["type"] == "custom_tool_call":
        events.append({"type": "response.custom_tool_call_input.done", "input": item["input"]})
    return _placed(events, item, position)


def _placed(events: list[Event], item: Item, position: int) -> list[Event]:
    return [{**event, "item_id": item["id"], "output_index": position} for event in events]
