"""The engine's side: the chat form that every provider translates to, and what an engine must answer.

An engine is one module here with a class `ENGINE`. It speaks token-level chat: for each request it returns the ids it
conditioned on, the ids it sampled and their logprobs, as vLLM does with `return_token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_gym.schema import EngineInfo, Message, OwnGrammar, Sampling, ToolDefinition, WeightVersion


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """A model call in chat form, whatever wire it came in by."""

    model: str
    messages: list[Message]
    tools: list[ToolDefinition] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required` or one named function; None where the harness said nothing."""
    parallel_tool_calls: bool | None = None
    """False: the harness asked for at most one tool call. Engines are not told; the record counts such requests."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    response_format: dict[str, Any] | None = None
    stream: bool = False
    wire: dict[str, Any] = field(default_factory=dict)
    """What the provider needs to answer in its own shape: freeform tool names, requested extras."""
    origins: dict[int, str] = field(default_factory=dict)
    """Index of an assistant message -> id of the call that its reasoning carrier names."""
    prompt_ids: NDArray[np.int32] | None = None
    """The prompt, already tokenised: the engine conditions on exactly these ids and `messages` only explain them."""
    prefix_length: int = 0
    """How many of `prompt_ids`, from the first, are the prompt and answer of the call that it continues."""
    new_messages: int = 0
    """How many of `messages`, to the last, come after that answer."""
    withheld_tools: list[str] = field(default_factory=list)
    """Server-side tools that the harness asked for and that no engine can execute."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """An engine's whole answer to one `ChatRequest`."""

    message: Message
    """An assistant message in chat form: `content`, `reasoning`, `tool_calls`; arguments are JSON text."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_sequence: str | None = None
    """The one of `ChatRequest.stop` that ended it, if one did."""
    prompt_ids: NDArray[np.int32]
    """The ids that the engine conditioned on, as it echoed them, shape (prompt,)."""
    response_ids: NDArray[np.int32]
    """The sampled ids, end-of-turn token included where it was sampled, shape (response,)."""
    logprobs: NDArray[np.float32]
    """Shape (response,), natural log."""
    sampling: dict[str, Any]
    """Every sampling field as it was sent."""
    weight_versions: list[WeightVersion] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Delta:
    """What an engine has added to its answer since the delta before. Concatenated, the deltas of an answer are the
    answer: their ids, logprobs and text equal the `Completion`'s."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Fragments in the form of streamed Chat Completions, one call after another: `index`; `id` and `function.name` in
    a call's first one; then pieces of `function.arguments`."""
    prompt_ids: NDArray[np.int32] | None = None
    """In the first delta only."""
    response_ids: list[int] = field(default_factory=list)
    """May hold ids whose text comes later: a parser is still buffering."""
    logprobs: list[float] = field(default_factory=list)


OnDelta = Callable[[Delta], None]


class EngineError(Exception):
    """The engine refused or failed. `status` is the HTTP status that vLLM answers (or would answer) with."""

    def __init__(self, status: int, message: str, *, kind: str = "engine_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class Engine(Protocol):
    """What the gateway needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """Known after `start`: model name, context length, tokenizer, how logprobs are taken."""
        ...

    weight_version: str | None
    """The version of the weights, as whoever updates them says (`Node.set_weight_version`); None: never said."""

    async def start(self) -> None:
        """Connect or load, and set `info`. Raises `EngineError` naming what is wrong."""
        ...

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        """Sample one answer. With `on_delta` the engine streams, and calls it with each piece as it comes; the result
        is the same. Raises `EngineError`; cancelling the task stops the engine's work."""
        ...

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        """The ids of a conversation and of the opening of the next answer. Raises `EngineError`."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        ...

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The model's own logprob (temperature 1, nothing truncated) of each id after those before it, shape (n,); nan
        for the first. May leave out ids at the end that the engine has no room for. Raises `EngineError`."""
        ...

    async def close(self) -> None: ...


def sampling_deviations(request: ChatRequest, own_grammar: OwnGrammar | None = None) -> list[str]:
    """Return the causes that bend the policy's distribution: fields of the harness (a forced tool, a grammar), or the
    engine's own grammar."""
    deviations = []
    if request.tool_choice not in (None, "auto", "none"):
        deviations.append("tool_choice")
    if request.tool_choice != "none" and any(tool["function"].get("strict") for tool in request.tools):
        deviations.append("tools.strict")  # engines hold the arguments of such a tool to its schema
    if request.response_format and request.response_format.get("type") != "text":
        deviations.append("response_format")
    if own_grammar == "all" or (own_grammar == "tools" and request.tools and request.tool_choice != "none"):
        deviations.append("own_grammar")
    return deviations
