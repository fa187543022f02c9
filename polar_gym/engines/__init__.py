"""Engines: the servers and libraries that sample tokens.

An engine speaks token-level chat: for each request it returns the ids that it conditioned on, the ids that it sampled
and their logprobs, as vLLM does with `return_token_ids`.

A plug-in is one module or package here that defines a class `ENGINE`. The class names its `Options`, a subclass of
`polar_gym.registry.Options` that the config is checked against, and is made from one value of it. It has the attributes
and methods of `Engine`.

The other modules are shared by the engines. `http` asks a server, and `openai_form` holds the requests and answers of
OpenAI-compatible APIs. `replicas` makes one engine of several servers, and `addresses` finds those of one name. `probe`
asks an engine for one token. `sampling` and `context_length` handle the fields and limits of a request, and `weights`
the versions of the weights.
The room uses `chat`, `http`, `registry` and `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.record import RoutedExperts, TokenIds
from polar_gym.registry import Makers
from polar_gym.schema import EngineInfo, Message, Sampling, ToolDefinition

UNREACHABLE = "unreachable"
"""The kind of an `EngineError` where no connection could be made: no request can bring that about."""


class EngineError(Exception):
    """The engine refused or failed. `status` is the HTTP status that vLLM answers (or would answer) with.

    `sampled`: the engine may have sampled tokens for the answer, of which none came. The call is not to be asked again,
    because its record is all that tells of them."""

    def __init__(self, status: int, message: str, *, kind: str = "engine_error", sampled: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.sampled = status, message, kind, sampled


class Engine(Protocol):
    """The attributes and methods that the gateway needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """Return the model name, the context length, the tokenizer and how logprobs are taken. Known after `start`."""
        ...

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that the trainer has set (`Node.set_weight_version`); None: never set."""
        ...

    @weight_version.setter
    def weight_version(self, version: str | None) -> None: ...

    @property
    def takes_prefix_only(self) -> bool:
        """Whether the engine takes only `prefix_length` of a request's `prompt_ids`, and templates everything after the
        last answer itself. Then a request with an answer among its new messages cannot be spliced."""
        ...

    async def start(self) -> None:
        """Connect or load, and set `info`. Raises `EngineError` that names the problem."""
        ...

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        """Sample one answer, and call `on_delta` with each piece as it comes, up to the cut of an answer that is cut
        off. An engine that gives whole answers only does not call `on_delta`.

        With `request.stream` the harness reads the pieces. The text of the answer is then theirs, also where an engine
        would read the whole answer in another way. Raises `EngineError`; cancelling the task stops the engine's work.
        """
        ...

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        """Return the ids of a conversation and of the opening of the next answer. Raises `EngineError`."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the model's logprob (temperature 1, nothing truncated) of each id after the ids before it, shape (n,);
        nan for the first. Ids at the end that do not fit into the context may be left out. Raises `EngineError`."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Replay:
    """The choices of the sampler at n ids, which a second pass repeats."""

    temperature: NDArray[np.float32]
    """The number by which the logits of each id are divided, shape (n,)."""
    kept: list[TokenIds]
    """The ids from which each id was drawn, n sets. An empty set stands for the vocabulary."""
    routed_experts: RoutedExperts | None = None
    """The experts at the first ids. The routers choose at the others; None: at all."""

    @classmethod
    def neutral(cls, n: int) -> Self:
        """Return temperature 1 and the vocabulary, with experts that the routers choose."""
        return cls(np.ones(n, np.float32), [np.empty(0, np.int32)] * n)


@runtime_checkable
class Replaying(Protocol):
    """An engine that can also score ids with given choices of the sampler."""

    async def replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        """Return logprobs as `Engine.score` does, after the choices of `replay`. Raises `EngineError`."""
        ...


@runtime_checkable
class Updating(Protocol):
    """An engine whose weights a trainer can replace while it runs."""

    async def set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        """Take new weights, a directory that transformers reads or tensors by name, and set `weight_version`. Answers
        that are being sampled go on under the new weights. Raises `EngineError`."""
        ...


ENGINES: Makers[Engine] = Makers("engine", __name__)
