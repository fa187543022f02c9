"""The chat form: one model call, its answer and the pieces of an answer, the same for every wire format.

Providers translate to and from this form, engines answer it, splicing works on it, and the gateway records it. Here are
the three forms (`ChatRequest`, `Completion`, `Delta`) and what can be said of them alone. `messages` makes assistant
messages and canonical JSON, and reads a message's text, `received` puts deltas together, `ids` makes the ids that leave
with an answer and reads them back. The room is plain data over `polar_gym.schema`. It uses no other room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.schema import Message, OwnGrammar, SamplingMask, ToolDefinition, WeightVersion

LONG = 1_000_000
"""Bytes from which a body or a message is long. Each step over a long one takes milliseconds, in which no other call of
the node goes on. So other calls run between these steps, and during steps that release the interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A model call in chat form, the same for every wire format. A request never changes: a decision about it makes a
    new request, and the lists and mappings in a request are not changed either."""

    model: str
    messages: list[Message]
    tools: list[ToolDefinition] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required` or one named function; None where the harness names none."""
    parallel_tool_calls: bool | None = None
    """False: the harness asked for at most one tool call. Engines are not told; the record counts such requests."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    response_format: dict[str, Any] | None = None
    stream: bool = False
    """Whether the harness reads the answer while the answer comes."""
    wire: dict[str, Any] = field(default_factory=dict)
    """Data that the provider needs to answer in the shape of its format: freeform tool names, requested extras."""
    origins: dict[int, str] = field(default_factory=dict)
    """Index of an assistant message -> id of the call that its reasoning carrier, or an id of its parts, names."""
    prompt_ids: NDArray[np.int32] | None = None
    """The tokenised prompt. The engine conditions on exactly these ids, and `messages` only explain them."""
    prefix_length: int = 0
    """How many of the first `prompt_ids` are the prompt and answer of the call that this request continues."""
    session_id: str | None = None
    """The session that asks: engines keep its tokens in one prefix cache."""
    routed_positions: int = 0
    """At how many of the first `prompt_ids` the routed experts are recorded: an answer need not tell them again."""
    withheld_tools: list[str] = field(default_factory=list)
    """Server-side tools that the harness asked for and that no engine can execute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's whole answer to one `ChatRequest`."""

    message: Message
    """An assistant message in chat form: `content`, `reasoning`, `tool_calls`; arguments are JSON text."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_sequence: str | None = None
    """The string of `ChatRequest.stop` that ended the answer, if one did."""
    prompt_ids: NDArray[np.int32]
    """The ids that the engine conditioned on, as it echoed them, shape (prompt,)."""
    response_ids: NDArray[np.int32]
    """The sampled ids, end-of-turn token included where it was sampled, shape (response,)."""
    logprobs: NDArray[np.float32]
    """Shape (response,), natural log."""
    sampling: dict[str, Any]
    """Every sampling field as it was sent."""
    weight_versions: list[WeightVersion] = field(default_factory=list)
    engine_tokens: int | None = None
    """How many tokens the engine counts for the answer. None where the engine gives no count."""
    cached_tokens: int | None = None
    """How many of `prompt_ids` the engine had in its prefix cache. None where the engine does not tell."""
    routed_experts: NDArray[np.integer[Any]] | None = None
    """See `ModelCall.routed_experts`: the rows after `ChatRequest.routed_positions`. None: the engine told none."""
    sampling_mask: SamplingMask | None = None
    """See `ModelCall.sampling_mask`. None: the engine told none, or nothing was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part that an engine has added to its answer since the delta before. All deltas of an answer, put together,
    are the answer: their ids, logprobs and text equal those of the `Completion`."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Fragments in the form of streamed Chat Completions, one call after another: `index`; `id` and `function.name` in
    a call's first one; then pieces of `function.arguments`."""
    prompt_ids: NDArray[np.int32] | None = None
    """In the first delta only."""
    response_ids: list[int] = field(default_factory=list)
    """May hold ids whose text comes later, because a parser still holds that text back."""
    logprobs: list[float] = field(default_factory=list)
    engine_tokens: int | None = None
    """How many tokens the engine counts for the answer so far. None where the engine gives no count yet."""


OnDelta = Callable[[Delta], None]


def has_media(message: Message) -> bool:
    """Return whether the message holds an image or the like, which ids of text cannot carry."""
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") != "text" for part in content)


def sampling_deviations(request: ChatRequest, own_grammar: OwnGrammar | None = None) -> list[str]:
    """Return the causes that bend the policy's distribution: fields of the harness (a forced tool, a grammar), or a
    grammar that the engine applies unasked."""
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
