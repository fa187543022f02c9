"""The policy of an embedded engine: it makes ids of a conversation, samples an answer, and makes text of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest
from polar_gym.engines import Replay
from polar_gym.engines.embedded.answers import Piece
from polar_gym.record import RoutedExperts, TokenIds
from polar_gym.schema import Message, Sampling, ToolDefinition


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled ids, end-of-turn token included where it was sampled. `ids` and `logprobs` have the same length."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    routed_experts: RoutedExperts | None = None
    """See `Completion.routed_experts`."""
    kept: list[TokenIds] | None = None
    """The ids from which each sampled id was drawn. None: not recorded, or nothing was cut."""
    versions: list[tuple[int, str]] = field(default_factory=list)
    """At which id the sampling began under which weights."""


TOKENS_AT_ONCE = 4
"""How many sampled tokens are told together: each time, the whole answer is decoded again where text is read along."""

OnIds = Callable[[list[int], list[float]], None]
"""Takes the ids sampled since its last call, with their logprobs. Called in the event loop's thread."""


class Policy(Protocol):
    tokenizer: str
    """A directory or `tokenizer.json` that decodes the ids."""
    max_model_len: int
    """Context length in tokens; set by `load`."""

    def load(self) -> None:
        """Read files; may block. Raises `EngineError` that names the missing part."""
        ...

    def prompt_ids(self, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        """Return the ids of a conversation and of the start of the next answer. May block. Raises `EngineError` for
        content that the policy cannot read."""
        ...

    async def generate(self, request: ChatRequest, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        """Sample the answer to `request`, whose `prompt_ids` and `max_tokens` are set, and tell `on_ids` the tokens as
        they come. Cancelling stops the work, and the tokens sampled by then are told before the call ends."""
        ...

    def pieces(self, ids: list[int]) -> list[Piece]:
        """Return the text of sampled ids, without the end-of-turn token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    async def replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        """See `polar_gym.engines.Replaying`."""
        ...

    def close(self) -> None: ...
