"""vLLM's streamed answers: the ids of the prompt in the first chunk, sampled ids with their logprobs in the others.

A chunk may hold ids and no text (a parser holds the text back), or many ids. Put together, the chunks are the answer
that vLLM gives without streaming, with two differences in tool calls. Streamed arguments are the text of the model,
while those of a whole answer are re-serialised. Streaming shows the valid part of a call with invalid JSON, while a
whole answer keeps the call as content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import orjson

from polar_gym.chat import Completion, Delta, OnDelta
from polar_gym.chat.received import Received
from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.engines.openai_form import as_ids, logprobs_of, stop_sequence
from polar_gym.engines.vllm import prompt_echo
from polar_gym.schema import WeightVersion

DONE = b"[DONE]"


class StreamedAnswer:
    """Takes the data of vLLM's events and tells each addition to `on_delta`. Every `EngineError` is a failed answer."""

    def __init__(self, http: Http, on_delta: OnDelta, sent: np.ndarray | None) -> None:
        """Begin an answer. `sent`: the prompt's ids, where the prompt was sent as ids."""
        self._http = http
        self._sent = sent
        self._on_delta = on_delta
        self._received = Received()
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._weight_versions: list[WeightVersion] = []
        self._done = False

    @property
    def begun(self) -> bool:
        """Return whether `on_delta` was called."""
        return self._received.prompt_ids is not None

    def add(self, data: bytes) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            chunk = orjson.loads(data) if self.begun else prompt_echo.loads(data, self._sent)
        except orjson.JSONDecodeError as error:
            raise self._http.broken_off(f"an event is not JSON ({error}): {data[:200]!r}") from error
        if chunk.get("error"):
            error = chunk["error"]
            raise self._http.broken_off(str(error.get("message", error) if isinstance(error, dict) else error))
        for choice in chunk["choices"]:  # one, or none in a chunk that reports usage
            delta = self._delta(chunk, choice)
            self._received.add(delta)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._stop_sequence = stop_sequence(choice) or self._stop_sequence
            self._weight_versions = weight_versions(choice) or self._weight_versions
            self._on_delta(delta)

    def completion(self, sampling: dict[str, Any]) -> Completion:
        """Return the whole answer, after all its events were added."""
        received = self._received
        if not self._done or self._finish_reason is None or received.prompt_ids is None:
            raise self._http.broken_off(f"the stream ended after {len(received.response_ids)} tokens")
        return Completion(
            message=received.message(),
            finish_reason=self._finish_reason,
            stop_sequence=self._stop_sequence,
            prompt_ids=received.prompt_ids,
            response_ids=as_ids(received.response_ids),
            logprobs=np.asarray(received.logprobs, np.float32),
            sampling=sampling,
            weight_versions=self._weight_versions,
        )

    def _delta(self, chunk: dict[str, Any], choice: dict[str, Any]) -> Delta:
        said = choice["delta"]
        prompt = None if self.begun else prompt_ids(self._http.url, chunk)
        names_the_role = not self.begun and choice.get("token_ids") is None  # such a chunk holds no sampled token
        ids, logprobs = ([], []) if names_the_role else ids_and_logprobs(self._http.url, choice)
        return Delta(
            reasoning=said.get("reasoning") or said.get("reasoning_content") or "",
            content=said.get("content") or "",
            tool_calls=[{**call, "function": call.get("function") or {}} for call in said.get("tool_calls") or []],
            prompt_ids=prompt,
            response_ids=ids,
            logprobs=logprobs,
        )


def prompt_ids(url: str, answer: dict[str, Any]) -> np.ndarray:
    """Return the ids that the engine conditioned on. Raises `EngineError` when the answer names none."""
    ids = answer.get("prompt_token_ids")
    if ids is None:
        raise _without_ids(url)
    return as_ids(ids)


def weight_versions(choice: dict[str, Any]) -> list[WeightVersion]:
    """Return the spans that the engine names; none before vLLM 0.33, except from `generate`."""
    spans = choice.get("weight_versions") or []
    return [
        WeightVersion(
            version=span["version"],
            engine_version=span["version"],
            start=span["start"],
            end=span["end"],
            older_cache=span["version"] != spans[0]["version"],
        )
        for span in spans
    ]


def ids_and_logprobs(url: str, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the sampled ids and one logprob for each. Raises `EngineError` when ids or logprobs are missing."""
    ids = choice.get("token_ids")
    if ids is None:
        raise _without_ids(url)
    return ids, logprobs_of(url, choice, ids)


async def event_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, however the bytes were cut. A line may be long: a prompt's ids."""
    pending = b""
    async for chunk in content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()


def _without_ids(url: str) -> EngineError:
    return EngineError(
        502,
        f"the engine at {url} answered without token ids: it does not know `return_token_ids`. "
        "Use vLLM 0.10.2 or later, and no router in between that drops fields",
    )
