"""Raw clients on the four wires: they ask, read as much as they want, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.exactness.stage import Opened, Stage

WIRES = ("chat", "messages", "responses", "google")
Message = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(slots=True)
class Answered:
    """What a client got."""

    status: int = 0
    text: str = ""
    whole: bool = False
    """Whether the client read the answer to its end."""
    marker: str = ""

    @property
    def content(self) -> str:
        """Return the words that the client of a chat stream has seen."""
        lines = self.text.split("\n")[:-1]  # the last one may be cut
        return _assembled("\n".join(lines))["content"]

    @property
    def message(self) -> Message:
        """Return the assistant message of a whole chat answer, for the next request."""
        if self.text.startswith("data:"):
            return _assembled(self.text)
        return json.loads(self.text)["choices"][0]["message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of a client."""

    wire: str = "chat"
    words: str = "Look at the error."
    stream: bool = True
    history: Sequence[Message] = ()
    """Chat messages before the words; the other wires begin new conversations."""
    tools: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body."""
    headers: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int = 200
    marked: bool = True
    """Whether the words end with a text that no other request has."""


async def ask(
    stage: Stage,
    session: Opened,
    what: Ask,
    *,
    leave_at: int | None = None,
    leave: Awaitable[Any] | None = None,
    into: Answered | None = None,
) -> Answered:
    """Send a request. `leave_at`: hang up after so many bytes of the answer; `leave`: when this is done. `into`: shows
    the answer while it comes."""
    marker = stage.asks(session)
    answered = into or Answered()
    answered.marker = marker
    reading = asyncio.create_task(_read(stage, session, what, marker, answered, leave_at))
    leaving = asyncio.ensure_future(leave) if leave is not None else None
    waiting = {reading} | ({leaving} if leaving is not None else set())
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting - {reading}:
        task.cancel()
    if not reading.done():
        reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
        await reading
    return answered


async def _read(
    stage: Stage, session: Opened, what: Ask, marker: str, answered: Answered, leave_at: int | None
) -> None:
    path, body, headers = _request(session, what, f"{what.words} {marker} ." if what.marked else what.words)
    url = stage.gateway.url + path
    async with stage.http.post(url, json=body, headers={**headers, **what.headers}) as response:
        answered.status = response.status
        async for piece in response.content.iter_any():
            answered.text += piece.decode("utf-8", "replace")
            if leave_at is not None and len(answered.text) >= leave_at:
                return  # the context closes the connection, for there is more to read
        answered.whole = True


def _request(session: Opened, what: Ask, words: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    bearer = {"Authorization": f"Bearer {session.key}"}
    if what.wire == "chat":
        body = {
            "model": "policy",
            "messages": [*what.history, {"role": "user", "content": words}],
            "stream": what.stream,
            "max_tokens": what.max_tokens,
        }
        tool = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
        return "/v1/chat/completions", body | ({"tools": [tool]} if what.tools else {}) | dict(what.more), bearer
    if what.wire == "messages":
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": words}],
            "stream": what.stream,
            "max_tokens": what.max_tokens,
        }
        tool = {"name": "bash", "input_schema": PARAMETERS}
        keys = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
        return "/v1/messages", body | ({"tools": [tool]} if what.tools else {}) | dict(what.more), keys
    if what.wire == "responses":
        body = {"model": "policy", "input": words, "stream": what.stream, "max_output_tokens": what.max_tokens}
        tool = {"type": "function", "name": "bash", "parameters": PARAMETERS}
        return "/v1/responses", body | ({"tools": [tool]} if what.tools else {}) | dict(what.more), bearer
    body = {
        "contents": [{"role": "user", "parts": [{"text": words}]}],
        "generationConfig": {"maxOutputTokens": what.max_tokens},
    }
    declared = {"functionDeclarations": [{"name": "bash", "parameters": PARAMETERS}]}
    method = "streamGenerateContent?alt=sse" if what.stream else "generateContent"
    path = f"/v1beta/models/policy:{method}"
    return path, body | ({"tools": [declared]} if what.tools else {}) | dict(what.more), {"x-goog-api-key": session.key}


async def play_turns(stage: Stage, session: Opened, result: str, *, edit: bool = False) -> Answered:
    """Play a call with a tool, hand back its result and the policy's words (others with `edit`), and ask again."""
    first = await ask(stage, session, Ask(words="tokens-20 tool", tools=True))
    message = first.message
    if edit:
        message["content"] = "Other words."
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    asked = {"role": "user", "content": f"tokens-20 tool {first.marker} ."}
    return await ask(stage, session, Ask(words="tokens-20", tools=True, history=[asked, message, *results]))


async def clean_sessions(stage: Stage) -> None:
    """Play two sessions with a continuation each, and one whose only call was left; nothing fails."""
    for session in (await stage.open(), await stage.open()):
        await play_turns(stage, session, "ok")
        await ask(stage, session, Ask(words="tokens-20"))
    await ask(stage, await stage.open(), Ask(words="tokens-200 pace-1"), leave_at=2500)
    await stage.close()


def _assembled(text: str) -> Message:
    """Return the assistant message of a chat stream."""
    message: Message = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices") or ():
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, value in (call.get("function") or {}).items():
                    calls[-1]["function"][name] += value or ""
    return message | ({"tool_calls": calls} if calls else {})
