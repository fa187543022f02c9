"""One row of a batch: a trace as a sequence to train, cut where it is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from polar_gym.record import LossMask, RoutedExperts, TokenIds, common_prefix
from polar_gym.schema import Episode, Kind, SamplingMask, Trace, Turn, WeightVersion

Span = TypeVar("Span", Turn, WeightVersion)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One training sequence.

    Invariant: the four arrays have one length; `logprobs` and `weights` are 0.0 where `loss_mask` is 0.
    """

    token_ids: TokenIds
    prompt_length: int
    """How many of the tokens are the prompt of the first call."""
    loss_mask: LossMask
    logprobs: NDArray[np.float32]
    """Log-probabilities as captured when the tokens were sampled."""
    weights: NDArray[np.float32]
    advantage: float
    reward: float
    group_id: str
    """See `Episode.group`; empty in an inert row."""
    session_id: str
    trace_id: str
    sampling: dict[str, Any] = field(default_factory=dict)
    """See `Episode.sampled_with`; empty in an inert row."""
    routed_experts: RoutedExperts | None = None
    """The experts at each position that was run, for router replay; the last token's is missing."""
    sampling_mask: SamplingMask | None = None
    """The tokens that each trained token was drawn from; empty sets elsewhere."""
    session_tokens: int = 0
    """How many tokens of the session are trained, in all rows of the batch: a sequence-level ratio is over these."""
    kind: Kind = "main"
    """The purpose of the trace's calls."""
    finish_reason: str | None = None
    """Why the last answer of the trace ended; `length`: it was cut off."""
    truncated_by: str | None = None
    """The budget that ended the session (`time`, `calls`, `tokens`), if one did."""
    components: dict[str, float] = field(default_factory=dict)
    """The parts of the session's reward, as the evaluator named them."""
    turns: list[Turn] = field(default_factory=list)
    """The spans of `token_ids` that each call sampled, also those that are not trained here."""
    weight_versions: list[WeightVersion] = field(default_factory=list)
    """The spans of `token_ids` that each version of the weights sampled."""
    parent_trace_id: str | None = None
    """The earlier trace of the session with which the row shares its longest prefix; None where it shares no token."""
    shared_prefix: int = 0
    """The length of that prefix."""
    call_advantages: dict[str, float] = field(default_factory=dict)
    """Call id -> the advantage of the call's tokens, for calls of the session with rewards or values of their own. All
    other tokens have `advantage`."""

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def inert(self) -> bool:
        """Return whether the row only fills up the batch."""
        return not self.trace_id

    @property
    def one_advantage(self) -> float:
        """Return the advantage of all tokens. Raises `ValueError` where calls have advantages of their own."""
        if self.call_advantages:
            raise ValueError(
                f"trace {self.trace_id}: this form has one advantage for a row; "
                "set turn_reward_weight=0, turn_values=False"
            )
        return self.advantage


def row_of(episode: Episode, trace: Trace, advantage: float) -> Row:
    """Return a trace as a row, without the weights of its tokens. The episode has a reward."""
    before = len(trace.prompt_ids)
    assert episode.reward is not None
    return Row(
        token_ids=np.concatenate([trace.prompt_ids, trace.response_ids]),
        prompt_length=before,
        loss_mask=np.concatenate([np.zeros(before, np.int8), trace.loss_mask]),
        logprobs=np.concatenate([np.zeros(before, np.float32), trace.logprobs]),
        weights=np.zeros(before + len(trace.response_ids), np.float32),
        advantage=advantage,
        reward=episode.reward,
        group_id=episode.group,
        session_id=episode.session.session_id,
        trace_id=trace.trace_id,
        sampling=episode.sampled_with(trace),
        routed_experts=trace.routed_experts,
        sampling_mask=trace.whole_mask,
        kind=trace.kind,
        finish_reason=trace.finish_reason,
        truncated_by=episode.session.truncated_by,
        components={} if episode.evaluation is None else episode.evaluation.components,
        turns=_moved(trace.turns, before),
        weight_versions=_moved(trace.weight_versions, before),
    )


def inert_row() -> Row:
    """Return a row that only fills up: one token, which attention needs, and nothing to train."""
    return Row(
        token_ids=np.zeros(1, np.int32),
        prompt_length=1,
        loss_mask=np.zeros(1, np.int8),
        logprobs=np.zeros(1, np.float32),
        weights=np.zeros(1, np.float32),
        advantage=0.0,
        reward=0.0,
        group_id="",
        session_id="",
        trace_id="",
    )


def parents_of(traces: Sequence[Trace]) -> list[tuple[str | None, int]]:
    """Return for each trace the earlier one with which it shares its longest prefix, and the length of that prefix."""
    sequences = [np.concatenate([trace.prompt_ids, trace.response_ids]) for trace in traces]
    parents: list[tuple[str | None, int]] = []
    for place, own in enumerate(sequences):
        parent, longest = None, 0
        for earlier in reversed(range(place)):
            other = sequences[earlier]
            # The token after the longest prefix so far decides nearly always: whole prefixes are compared rarely.
            if min(len(own), len(other)) > longest and own[longest] == other[longest]:
                length = common_prefix(own, other)
                if length > longest:
                    parent, longest = traces[earlier].trace_id, length
        parents.append((parent, longest))
    return parents


def first_tokens(row: Row, tokens: int) -> Row:
    """Return the row cut to its first `tokens`."""
    return replace(
        row,
        token_ids=row.token_ids[:tokens],
        prompt_length=min(row.prompt_length, tokens),
        loss_mask=row.loss_mask[:tokens],
        logprobs=row.logprobs[:tokens],
        weights=row.weights[:tokens],
        routed_experts=None if row.routed_experts is None else row.routed_experts[:tokens],
        sampling_mask=None if row.sampling_mask is None else row.sampling_mask.first(tokens),
        turns=_first(row.turns, tokens),
        weight_versions=_first(row.weight_versions, tokens),
        shared_prefix=min(row.shared_prefix, tokens),
    )


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [span.model_copy(update={"start": span.start + by, "end": span.end + by}) for span in spans]


def _first(spans: Sequence[Span], tokens: int) -> list[Span]:
    return [span.model_copy(update={"end": min(span.end, tokens)}) for span in spans if span.start < tokens]
