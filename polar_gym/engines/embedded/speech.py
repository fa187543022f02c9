"""The deltas of an embedded engine's answer: text is told as soon as no later token can turn it into something else.

These parts are held back: an unfinished character, text that may become a tag or a stop string, and everything from the
first `<tool_call>` on. One broken call makes all calls text. Calls are therefore told when the answer is complete, each
one whole. Where nobody reads along, ids come as they are sampled, and all text at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import Delta, OnDelta
from polar_gym.engines.embedded.answers import CALL, TAGS, Piece, cut_at_stop, first_stop, split_reasoning, text_of
from polar_gym.schema import Message

UNFINISHED = "\ufffd"
"""The text that a decoder gives for the first bytes of a character."""


class Speech:
    """One answer on its way from ids to deltas."""

    def __init__(
        self,
        on_delta: OnDelta,
        prompt_ids: NDArray[np.int32],
        pieces: Callable[[list[int]], list[Piece]],
        *,
        stop: list[str],
        calls: bool,
        thinking: bool,
        live: bool,
    ) -> None:
        """Begin an answer. `pieces` is the policy's method; `stop`, `calls` and `thinking` are those of the parser.
        `live`: whether text is read along. The whole answer is decoded for each piece of it."""
        self._on_delta = on_delta
        self._prompt_ids: NDArray[np.int32] | None = prompt_ids
        self._pieces = pieces
        self._stop, self._calls, self._thinking, self._live = stop, calls, thinking, live
        self._ids: list[int] = []
        self._told = ("", "")

    def add(self, ids: list[int], logprobs: list[float]) -> None:
        """Tell the next sampled ids. The delta may hold no text."""
        self._ids += ids
        self._tell(self._certain() if self._live else self._told, response_ids=ids, logprobs=logprobs)

    def cut_off(self) -> None:
        """Tell the certain text of an answer that does not come to its end, where ids came without text."""
        if self._ids and not self._live:
            self._tell(self._certain())

    def finish(self, message: Message) -> None:
        """Tell the rest of the answer, all of whose ids were added."""
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
        self._tell((message.get("reasoning") or "", message["content"] or ""), tool_calls=calls)

    def _tell(self, known: tuple[str, str], **added: Any) -> None:
        reasoning, content = known[0][len(self._told[0]) :], known[1][len(self._told[1]) :]
        prompt_ids, self._prompt_ids, self._told = self._prompt_ids, None, known
        said = Delta(reasoning=reasoning, content=content, prompt_ids=prompt_ids, engine_tokens=len(self._ids), **added)
        self._on_delta(said)

    def _certain(self) -> tuple[str, str]:
        """Return the reasoning and the content that no later token can change."""
        pieces = self._pieces(self._ids)
        if first_stop(pieces, self._stop):
            pieces = cut_at_stop(pieces, self._stop)  # nothing more comes
        else:
            pieces = _without_tail(pieces, (*TAGS, *self._stop))
        reasoning, rest = split_reasoning(pieces, thinking=self._thinking)
        if self._calls and (CALL, True) in rest:
            rest = rest[: rest.index(Piece(CALL, is_tag=True))]
        content = text_of(rest)
        # Blank text may yet be followed by `<think>`, or by a call that makes it nothing.
        return reasoning or "", content if content.strip() else ""


def _without_tail(pieces: list[Piece], words: tuple[str, ...]) -> list[Piece]:
    """Return the pieces without an end that may become one of `words`, or a character."""
    text = text_of(pieces).rstrip(UNFINISHED)
    starts = range(max(0, len(text) + 1 - max(map(len, words))), len(text))
    certain = next((start for start in starts if _begins_one(text[start:], words)), len(text))
    kept = []
    for piece in pieces:
        if len(piece.text) > certain:
            return kept if piece.is_tag else [*kept, Piece(piece.text[:certain], is_tag=False)]
        kept.append(piece)
        certain -= len(piece.text)
    return kept


def _begins_one(tail: str, words: tuple[str, ...]) -> bool:
    return any(len(tail) < len(word) and word.startswith(tail) for word in words)
