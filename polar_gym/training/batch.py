"""Traces as rows of a training batch, with the counts of all traces and tokens that came in and that went out.

A row is a whole sequence with the advantage of its session and a weight for each trainable token. The weights of a
batch sum to one, so that `-(weights * advantage * ratio).sum()` is the policy-gradient loss. A sampled token is
trainable in one trace only, therefore neither weighting lets a session count more because it forked.

Advantages are computed before rows are dropped or cut. Therefore no dropped row changes the mean of a group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from polar_gym.schema import Episode, Trace
from polar_gym.training.advantage import Scale, advantages, call_advantages, without_variance
from polar_gym.training.row import Row, first_tokens, inert_row, parents_of, row_of
from polar_gym.training.turn_values import state_values, turn_advantages

Overlong = Literal["drop", "truncate", "mask"]
"""The treatment of a trace that is longer than the trainer takes. `drop`: no row. `truncate`: its first tokens.
`mask`: its first tokens, none of which is trained, so that there are as many rows as traces."""

ZeroVariance = Literal["keep", "drop"]
"""The treatment of a group whose rewards are all equal. `keep`: rows with advantages of 0. `drop`: no rows."""

Truncated = Literal["keep", "zero", "mask"]
"""The treatment of a session that a budget ended. `keep`: its reward, whatever was done by then. `zero`: the reward
0.0, so that the policy learns to end by itself; a reward below zero stays. Calls keep their rewards. `mask`: no reward.
"""

Weighting = Literal["token", "session"]
"""`token`: all trainable tokens of a batch weigh the same (DAPO's token mean). `session`: all sessions weigh the same,
and so do all tokens of one session (GRPO's mean of means, over sessions instead of rows)."""


@dataclass(slots=True)
class BatchCounts:
    """The counts of a batch. These hold exactly: `traces == rows + sum(traces_left_out.values())` and
    `trainable_tokens == tokens + sum(tokens_left_out.values())`.

    Reasons: `no_reward` (a masked episode), `no_trainable_token`, `zero_variance`, `overlong`, `other_trace` (the form
    has room for one trace of a session).
    """

    episodes: int = 0
    masked_episodes: int = 0
    """Episodes without a reward: they are in no group's mean."""
    groups: int = 0
    """Groups with at least one scored session."""
    zero_variance_groups: int = 0
    traces: int = 0
    trainable_tokens: int = 0
    rows: int = 0
    tokens: int = 0
    """Trainable tokens in all rows."""
    traces_left_out: Counter[str] = field(default_factory=Counter)
    tokens_left_out: Counter[str] = field(default_factory=Counter)
    inert_rows: int = 0
    """Rows that only fill up the batch. `rows` does not count them."""

    @property
    def holds(self) -> bool:
        return (
            self.traces == self.rows + self.traces_left_out.total()
            and self.trainable_tokens == self.tokens + self.tokens_left_out.total()
        )

    def leave_out(self, reason: str, *, traces: int, tokens: int) -> None:
        self.traces_left_out[reason] += traces
        self.tokens_left_out[reason] += tokens


@dataclass(frozen=True, slots=True)
class Batch:
    rows: list[Row]
    counts: BatchCounts


def make_batch(
    episodes: Iterable[Episode],
    *,
    max_tokens: int | None = None,
    overlong: Overlong = "drop",
    zero_variance: ZeroVariance = "keep",
    truncated: Truncated = "keep",
    scale: Scale = "none",
    weighting: Weighting = "token",
    multiple_of: int = 1,
    turn_reward_weight: float = 0.0,
    turn_values: bool = False,
    allow_scripted: bool = False,
) -> Batch:
    """Return the rows of a GRPO step. Pass every session of the step: they are grouped here, by `Episode.group`.

    `max_tokens`: the longest sequence that the trainer takes, prompt included. `multiple_of`: the number of
    data-parallel ranks; inert rows fill the batch up to a multiple. `turn_reward_weight`: the weight of
    `call_advantages` beside the session's advantage (λ of MT-GRPO, arXiv:2505.11821). `turn_values`: calls have
    the advantages of `training.turn_values`, where other sessions value a state before them. `allow_scripted`:
    take tokens that a script chose, which no model sampled: to try things out. Raises `ValueError` for such tokens
    without it, for a session that occurs twice, for a reward or a logprob that is not finite, for calls whose rewards
    cannot be weighted because an older episode does not tell their tokens, and for a wrong setting.
    """
    _check_choice("truncated", truncated, Truncated)
    episodes = [regarded(episode, truncated) for episode in episodes]
    _check_choice("overlong", overlong, Overlong)
    _check_choice("zero_variance", zero_variance, ZeroVariance)
    _check_choice("scale", scale, Scale)
    _check_choice("weighting", weighting, Weighting)
    _check(episodes, max_tokens, multiple_of, turn_reward_weight)
    if not allow_scripted:
        check_sampled(episodes)
    if turn_values and (turn_reward_weight or scale != "none"):
        raise ValueError(
            "turn_values=True: advantages are differences of values; set turn_reward_weight=0, scale='none'"
        )
    groups, of_sessions, of_calls = _advantages(episodes, scale, turn_reward_weight, turn_values=turn_values)
    rewards = [episode.reward for episode in episodes]
    flat = without_variance(rewards, groups)
    flat -= {group for group, own in zip(groups, of_calls, strict=True) if any(own.values())}
    counts = replace(begin_counts(rewards, groups), zero_variance_groups=len(flat))
    rows: list[Row] = []
    for episode, group, advantage, own in zip(episodes, groups, of_sessions, of_calls, strict=True):
        parents = parents_of(episode.trajectory.traces)
        for trace, (parent, shared) in zip(episode.trajectory.traces, parents, strict=True):
            counts.traces += 1
            counts.trainable_tokens += trace.trainable_tokens
            reason = _no_row(episode, trace, flat=zero_variance == "drop" and group in flat)
            if reason is not None:
                counts.leave_out(reason, traces=1, tokens=trace.trainable_tokens)
                continue
            whole = replace(row_of(episode, trace, advantage), parent_trace_id=parent, shared_prefix=shared)
            row = _fitted(replace(whole, call_advantages=own), max_tokens, overlong)
            left = row.trainable_tokens if row is not None else 0
            if (lost := trace.trainable_tokens - left) or row is None:
                counts.leave_out("overlong", traces=int(row is None), tokens=lost)
            rows += [row] if row is not None else []
    counts.rows = len(rows)
    counts.tokens = sum(row.trainable_tokens for row in rows)
    counts.inert_rows = -len(rows) % multiple_of
    return Batch([*weighted(rows, weighting), *[inert_row()] * counts.inert_rows], counts)


def regarded(episode: Episode, truncated: Truncated) -> Episode:
    """Return the episode with the reward that `truncated` gives to a session which a budget ended."""
    if truncated == "keep" or not episode.truncated or episode.reward is None:
        return episode
    return episode.model_copy(update={"reward": min(0.0, episode.reward) if truncated == "zero" else None})


def _advantages(
    episodes: Sequence[Episode], scale: Scale, turn_reward_weight: float, *, turn_values: bool
) -> tuple[list[str], list[float], list[dict[str, float]]]:
    """Return for each session its group, its advantage and those of its calls that have advantages of their own."""
    rewards, groups = rewards_and_groups(episodes)
    of_sessions = advantages(rewards, groups, scale=scale).tolist()
    if turn_values:
        return groups, of_sessions, _of_values(episodes)
    return groups, of_sessions, _of_calls(episodes, of_sessions, scale, turn_reward_weight)


def _of_calls(
    episodes: Sequence[Episode], of_sessions: Sequence[float], scale: Scale, weight: float
) -> list[dict[str, float]]:
    """Return for each session the advantages of its calls up to the last one with a reward of its own; none without a
    weight."""
    _, groups = rewards_and_groups(episodes)
    rewards = [_call_rewards(episode) if weight else {} for episode in episodes]
    pairs = zip(of_sessions, call_advantages(rewards, groups, scale=scale), strict=True)
    return [{call_id: whole + weight * value for call_id, value in own.items()} for whole, own in pairs]


def _call_rewards(episode: Episode) -> dict[str, float | None]:
    """Return the calls that a session trains, in the order of arrival, with their rewards; none where the session or
    all of these calls have no reward. Rewards of other calls (recorded ones of a branch, titles, abandoned ones) would
    move the mean that trained calls are compared with.
    """
    if episode.reward is None or episode.evaluation is None:
        return {}
    rewards = episode.evaluation.call_rewards
    trained = {
        turn.call_id
        for trace in episode.trajectory.traces
        for turn in trace.turns
        if trace.loss_mask[turn.start : turn.end].any()
    }
    # The record of older episodes does not have the order of all calls.
    order = [call_id for call_id in episode.trajectory.delivered or rewards if call_id in trained]
    return {call_id: rewards.get(call_id) for call_id in order} if trained & rewards.keys() else {}


def _of_values(episodes: Sequence[Episode]) -> list[dict[str, float]]:
    """Return for each session the advantages of its calls by the values of its states; none without a reward."""
    values = state_values(episodes)
    return [
        turn_advantages(episode, values[episode.session.session_id]) if episode.reward is not None else {}
        for episode in episodes
    ]


def rewards_and_groups(episodes: Sequence[Episode]) -> tuple[list[float | None], list[str]]:
    """Return the reward and the group of each episode."""
    return [episode.reward for episode in episodes], [episode.group for episode in episodes]


def begin_counts(rewards: Sequence[float | None], groups: Sequence[str]) -> BatchCounts:
    """Return the counts that are known before any trace is examined. Both have an entry for each episode."""
    return BatchCounts(
        episodes=len(rewards),
        masked_episodes=rewards.count(None),
        groups=len({group for group, reward in zip(groups, rewards, strict=True) if reward is not None}),
        zero_variance_groups=len(without_variance(rewards, groups)),
    )


def _check_choice(name: str, given: str, choices: Any) -> None:
    """Raise `ValueError` for an unknown choice: the code would take it for the last one."""
    if given not in get_args(choices):
        raise ValueError(f"{name}={given!r}: unknown; known: {', '.join(map(repr, get_args(choices)))}")


def _check(episodes: Sequence[Episode], max_tokens: int | None, multiple_of: int, turn_reward_weight: float) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens!r}: expected at least 1, or None")
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of!r}: expected at least 1")
    if not 0 <= turn_reward_weight < math.inf:
        raise ValueError(f"turn_reward_weight={turn_reward_weight!r}: expected a finite number of at least 0")
    for episode in episodes:
        if episode.reward is not None and not math.isfinite(episode.reward):
            raise ValueError(f"session {episode.session.session_id}: reward={episode.reward!r} is not a finite number")
        if turn_reward_weight:
            _check_calls(episode)
    for session_id, times in Counter(episode.session.session_id for episode in episodes).items():
        if times > 1:
            raise ValueError(f"session {session_id} occurs {times} times: its tokens would be trained as often")
    check_logprobs(episodes)


def _check_calls(episode: Episode) -> None:
    """Raise `ValueError` where a call's reward is not finite, or where a trace does not tell its calls' tokens."""
    rewards = episode.evaluation.call_rewards if episode.evaluation is not None and episode.reward is not None else {}
    for call_id, reward in rewards.items():
        if not math.isfinite(reward):
            raise ValueError(
                f"session {episode.session.session_id}: the reward {reward!r} of {call_id} is not a finite number"
            )
    if rewards and not all(trace.turns for trace in episode.trajectory.traces):
        raise ValueError(
            f"session {episode.session.session_id}: its calls have rewards, but its traces do not tell the tokens of "
            "each call (an older polar-gym made them); leave the session out, or set turn_reward_weight=0"
        )


def check_sampled(episodes: Sequence[Episode]) -> None:
    """Raise `ValueError` for a scored session of a scripted policy: its tokens must not be trained by accident."""
    for episode in episodes:
        if episode.reward is not None and episode.engine.scripted:
            raise ValueError(
                f"session {episode.session.session_id}: a script chose its tokens (engine {episode.engine.name}), "
                "no model did; leave the session out (make_batch takes it with allow_scripted=True, to try things out)"
            )


def check_logprobs(episodes: Sequence[Episode]) -> None:
    """Raise `ValueError` where a logprob of a scored session is not finite: the loss would not be finite either."""
    for episode in episodes:
        for trace in episode.trajectory.traces if episode.reward is not None else []:
            if not np.isfinite(trace.logprobs).all():
                raise ValueError(
                    f"session {episode.session.session_id}, trace {trace.trace_id}: the engine gave a logprob that is "
                    "not a finite number; leave the session out"
                )


def _no_row(episode: Episode, trace: Trace, *, flat: bool) -> str | None:
    if episode.reward is None:
        return "no_reward"
    if not trace.trainable_tokens:
        return "no_trainable_token"
    return "zero_variance" if flat else None


def _fitted(row: Row, max_tokens: int | None, overlong: Overlong) -> Row | None:
    """Return the row cut to `max_tokens`. None: the trace gets no row.

    A cut row without trainable tokens is dropped too, except with `mask`, which keeps all rows.
    """
    if max_tokens is None or len(row.token_ids) <= max_tokens:
        return row
    if overlong == "drop":
        return None
    cut = first_tokens(row, max_tokens)
    if overlong == "mask":
        return replace(cut, loss_mask=np.zeros_like(cut.loss_mask), logprobs=np.zeros_like(cut.logprobs))
    return cut if cut.trainable_tokens else None


def weighted(rows: Sequence[Row], weighting: Weighting) -> list[Row]:
    """Return the rows of a whole batch with their weights, and with the number of tokens that their session trains."""
    of_session: Counter[str] = Counter()
    for row in rows:
        of_session[row.session_id] += row.trainable_tokens
    all_tokens, sessions = of_session.total(), sum(count > 0 for count in of_session.values())

    def weight(row: Row) -> float:
        return 1 / all_tokens if weighting == "token" else 1 / (sessions * of_session[row.session_id])

    return [
        replace(
            row,
            weights=(row.loss_mask * weight(row) if row.trainable_tokens else row.weights).astype(np.float32),
            session_tokens=of_session[row.session_id],
        )
        for row in rows
    ]
