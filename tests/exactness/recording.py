"""Reads a recording: ids, logprobs and prompt of each answer, as the engine gave them and as they were passed on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Tokens:
    """The tokens that one side of the proxy saw of an answer."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt: list[int] | None = None
    pieces: list[tuple[int, str]] = field(default_factory=list)
    """How many tokens each event brought, where it brought any, and its words."""
    counted: int | None = None
    """The engine's own count for the answer, where it tells one."""

    def tokens_of(self, words: str) -> int:
        """Return how many tokens came up to the last event whose words are in the answer's first words."""
        tokens = length = seen = 0
        for brought, said in self.pieces:
            tokens, length = tokens + brought, length + len(said)
            if said and length <= len(words):
                seen = tokens
        return seen


@dataclass(slots=True)
class Answer:
    """One request to the engine and what came of it."""

    number: int
    at: float
    path: str
    body: dict[str, Any]
    raw: str
    """The request's body as text."""
    status: int = 0
    kind: str = ""
    """The answer's content type."""
    given: Tokens = field(default_factory=Tokens)
    """What the engine gave to the proxy."""
    sent: Tokens = field(default_factory=Tokens)
    """What the proxy gave to the gateway, as far as whole events or a whole body of it are there."""
    end: str = "unfinished"
    ended_at: float = float("inf")
    death: float | None = None
    """When the gateway was killed, if that was while this answer was under way."""
    sent_to_the_dead: int = 0
    """How many tokens were passed on after the gateway had been killed, before its connection broke."""
    passed: list[tuple[float, int]] = field(default_factory=list)
    """When parts of the answer were passed on, and how many bytes."""

    @property
    def own(self) -> str | None:
        """Return why the gateway asked for itself, or None for a call of a harness."""
        if "prompt_logprobs" in self.body:
            return "score"
        messages = self.body.get("messages") or []
        words = messages[0].get("content") if len(messages) == 1 else None
        if self.body.get("max_tokens") == 1 and words in ("ping", "Hello"):
            return "probe"
        return "probe" if (self.body.get("sampling_params") or {}).get("max_tokens") == 1 else None

    @property
    def interval(self) -> int:
        """Return how many tokens the engine may hold back for one event."""
        return (self.body.get("sampling_params") or self.body).get("stream_interval") or 1

    @property
    def grammar(self) -> list[str]:
        """Return the parts of the request that put the answer under a grammar."""
        return list(grammars(self.body))


SAMPLING_PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
UNREAD_SECONDS = 1.0
"""How long before the gateway's death the end of an answer may have come, and not have been read by the gateway."""
NO_GRAMMAR = (None, "auto", "none")


def grammars(body: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the fields by which vLLM holds an answer to a grammar."""
    parameters = body.get("sampling_params") or {}
    for name in ("structured_outputs", "guided_json", "guided_choice", "guided_regex", "guided_grammar"):
        if body.get(name) or parameters.get(name):
            yield name
    if (body.get("response_format") or {}).get("type", "text") != "text":
        yield "response_format"
    if body.get("tools"):
        if body.get("tool_choice") not in NO_GRAMMAR:
            yield "tool_choice"
        if body.get("parallel_tool_calls") is False:
            yield "parallel_tool_calls"
        if any((tool.get("function") or {}).get("strict") for tool in body["tools"]):
            yield "strict"


def read_recording(path: Path) -> list[Answer]:
    """Return every request on a route that samples, in order, with its answer."""
    answers: dict[int, Answer] = {}
    texts: dict[int, tuple[list[str], list[str]]] = {}
    for line in _lines(path):
        number = line.get("n")
        if number is None:
            if "killed" in line["note"]:
                death = line["note"]["killed"]  # a request may still come between this time and the line's
                for answer in answers.values():
                    if answer.death is None and answer.ended_at >= death - UNREAD_SECONDS:
                        answer.death = death
        elif "path" in line:
            if line["path"] in SAMPLING_PATHS:
                body = json.loads(line["body"].encode("latin-1") or b"{}")
                answers[number] = Answer(number, line["t"], line["path"], body, line["body"])
                texts[number] = ([], [])
        elif number in answers:
            _follow(answers[number], texts[number], line)
    for number, answer in answers.items():
        given, sent = ("".join(part).encode("latin-1") for part in texts[number])
        if answer.status == 200:
            answer.given, answer.sent = _tokens(answer, given), _tokens(answer, sent)
        if answer.death is not None:
            alive = sum(size for time, size in answer.passed if time < answer.death)
            answer.sent_to_the_dead = len(answer.sent.ids) - len(_tokens(answer, sent[:alive]).ids)
    return list(answers.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _follow(answer: Answer, text: tuple[list[str], list[str]], line: dict[str, Any]) -> None:
    if "status" in line:
        answer.status = answer.status or line["status"]
        answer.kind = answer.kind or line["kind"]
    elif "got" in line:
        text[0].append(line["got"])
        text[1].append(line.get("shown", line["got"])[: line["sent"]])
        answer.passed.append((line["t"], line["sent"]))
    elif answer.end == "unfinished":
        answer.end, answer.ended_at = line["end"], line["t"]


def _tokens(answer: Answer, text: bytes) -> Tokens:
    """Return the tokens in an answer's bytes. Of a stream, whole events count; of a JSON object, only all of it."""
    tokens = Tokens()
    if "event-stream" in answer.kind:
        for event in text.split(b"\n\n")[:-1]:
            for line in event.splitlines():
                data = line[5:].strip()
                if line.startswith(b"data:") and data.startswith(b"{"):
                    _add(tokens, _parsed(data))
    else:
        _add(tokens, _parsed(text))
    return tokens


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except ValueError:
        return {}


def _add(tokens: Tokens, part: dict[str, Any]) -> None:
    choices: Iterable[dict[str, Any]] = part.get("choices") or ()
    if part.get("prompt_token_ids") is not None:
        tokens.prompt = part["prompt_token_ids"]
    if part.get("usage"):
        tokens.counted = part["usage"].get("completion_tokens")
    for choice in choices:
        if choice.get("prompt_token_ids") is not None:
            tokens.prompt = choice["prompt_token_ids"]
        ids = choice.get("token_ids") or []
        entries = ((choice.get("logprobs") or {}).get("content") or []) if ids else []
        tokens.ids += ids
        tokens.pieces += [(len(ids), (choice.get("delta") or {}).get("content") or "")] if ids else []
        tokens.logprobs += [entry["logprob"] for entry in entries]
