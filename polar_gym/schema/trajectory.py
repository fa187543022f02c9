"""The training sequences that a session's calls became, and the record of its token counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from polar_gym.record import Logprobs, LossMask, Record, RoutedExperts, TokenIds
from polar_gym.schema.call import Kind, Message, SamplingMask, Score, ToolAttempt, ToolDefinition, WeightVersion


class Turn(Record):
    """The tokens of a trace that one call sampled."""

    call_id: str
    start: int
    end: int
    """The call sampled `response_ids[start:end]`."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """The fields of `Sampling` that shape a distribution, as they were sent with the call."""
    reward: float | None = None
    """The reward of the call alone (`EvaluationResult.call_rewards`); None where the evaluator gave none."""
    message: int | None = None
    """The place of the call's answer in the trace's messages; None: it is not among them, or the episode is older."""


class Trace(Record):
    """One training sequence: `prompt_ids` (never trained), then `response_ids` with its mask and logprobs.

    Invariant: `response_ids`, `loss_mask` and `logprobs` have one length; `logprobs` is 0.0 where `loss_mask` is 0.
    """

    trace_id: str
    session_id: str
    kind: Kind = "main"
    prompt_ids: TokenIds
    response_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    weight_versions: list[WeightVersion] = Field(default_factory=list)
    """Spans of `response_ids`."""
    messages: list[Message]
    """The same as messages, as the model saw and said them: a harness may hand an answer back in other words."""
    tools: list[ToolDefinition] = Field(default_factory=list)
    finish_reason: str | None = None
    call_ids: list[str]
    reward: float | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    """The fields of `Sampling` that shape a distribution, as they were sent with the last call."""
    routed_experts: RoutedExperts | None = None
    """The experts at each position of `prompt_ids + response_ids` except the last, which was never run. None: not
    recorded for each of these positions."""
    sampling_mask: SamplingMask | None = None
    """One set for each of `response_ids`, empty where `loss_mask` is 0. None: not recorded, or nothing was cut."""
    branched_from: str | None = None
    """The session that sampled, and trains, the beginning of this sequence; None: no other session has a part of it."""
    shared_prefix: int = 0
    """The length of that beginning, in ids of `prompt_ids + response_ids`; all of it is masked."""
    turns: list[Turn] = Field(default_factory=list)
    """One for each of `call_ids`, in order; calls that are context only have one, too. None in older episodes."""

    @property
    def whole_mask(self) -> SamplingMask | None:
        """Return the sampling mask of `prompt_ids + response_ids`; the sets of the prompt are empty."""
        return None if self.sampling_mask is None else self.sampling_mask.after(len(self.prompt_ids))

    @property
    def trainable_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


class Break(Record):
    """A call whose messages belong to a known conversation, but whose tokens do not continue that conversation."""

    call_id: str
    parent_id: str | None = None
    """None where the request names known calls, but continues none of them."""
    position: int | None = None
    """The first prompt position that differs from the parent's prompt and answer."""
    cause: str


class Fidelity(Record):
    """The token counts of a session: `sampled_tokens == trainable_tokens + sum(excluded.values())`, exactly.

    The engine sampled `sampled_tokens + sum(unsent.values())` tokens for the session, as long as `uncounted` is empty.
    """

    sampled_tokens: int = 0
    """Sampled by the engine and received by the gateway, over all calls."""
    trainable_tokens: int = 0
    excluded: dict[str, int] = Field(default_factory=dict)
    """Tokens not trained on, by reason."""
    calls: int = 0
    traces: int = 0
    traces_by_kind: dict[str, int] = Field(default_factory=dict)
    traces_per_request: int = 0
    """The number of traces that the builder `per_request` would have made."""
    spliced: int = 0
    """Continuations whose prompt was the ids already seen plus the new ones."""
    canonical: int = 0
    """Continuations that the engine templated, and whose token prefix held nevertheless."""
    breaks: list[Break] = Field(default_factory=list)
    """Continuations whose token prefix broke: each begins a new trace."""
    single_tool_call: int = 0
    """Calls whose harness asked for at most one tool call. The engine was not told of this wish."""
    unsent: dict[str, int] = Field(default_factory=dict)
    """Tokens beyond `sampled_tokens` that the engine counts for the session's calls, by the outcome of the call: the
    engine sampled and never sent them."""
    uncounted: dict[str, int] = Field(default_factory=dict)
    """Calls for which the engine gave no count, by the call's `error_kind` or outcome. Each may hide as many sampled
    tokens as the engine holds back (`EngineInfo.stream_interval`), and those on the way to the gateway."""
    edited_answers: int = 0
    """Answers that came back in other words, while spliced prompts kept the policy's own tokens."""
    prefill: int = 0
    """Prompt tokens of all calls; of a spliced continuation, only the tokens after its parent's answer."""
    scores: list[Score] = Field(default_factory=list)
    """The second passes over calls, where some were scored while the session ran."""

    @property
    def exact(self) -> bool:
        return self.sampled_tokens == self.trainable_tokens + sum(self.excluded.values())


class Trajectory(Record):
    """All traces of a session, and the token counts that prove that no token was lost."""

    builder: str
    traces: list[Trace]
    fidelity: Fidelity
    delivered: list[str] = Field(default_factory=list)
    """The ids of the calls whose answers the harness got, in order; those that were replayed, too."""
    rejected: list[str] = Field(default_factory=list)
    """The ids of the calls after whose whole answer the harness asked the same again, and which no call continues; none
    in files of earlier versions. They are trained unless `builder.train_rejected` is off."""
    branched: int | None = None
    """How many calls were answered from the record of another session; None in files of earlier versions."""
    tool_attempts: list[ToolAttempt] = Field(default_factory=list)
    """The tool calls that the policy attempted, in order; none where the session was cancelled or its node died."""
