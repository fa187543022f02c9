"""The law of the packing, as a check of any trainer: the gradient of a step does not depend on how sessions are split
into rows, padded, put into micro-batches and ranks.

    findings = check(adapter, model, vocabulary=32)
    assert holds(findings), findings

An *adapter* runs a trainer's own code: `adapter(model, step)` runs forward and backward passes over the rows of a
`Step`, and leaves the gradient that the optimizer would get in the model's parameters. Ranks are played one after the
other. A trainer that averages gradients over ranks is played by an adapter that divides by their number. `train_arrays`
is the adapter of plain torch code on the arrays of `padded`.

`check` compares each gradient with that of the whole sessions, computed trace by trace, without rows and padding. The
model is a small causal one in float64 that is called as those of `transformers` are. A trainer with a loss of its own
passes that as `losses`: a function over the tokens of a whole session.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np

from polar_gym.schema import Turn
from polar_gym.training.batch import Weighting, weighted
from polar_gym.training.row import Row, first_tokens, inert_row
from polar_gym.training.tensors import padded, to_torch

CLIP = 0.2
TRUNCATE_AT = 2.0
KL_COEFFICIENT = 0.1
TOLERANCE = 1e-6
"""The largest relative difference of a gradient that conforms. Weights and advantages are float32."""

TokenLoss = Callable[[Any, Any, Any], Any]
"""Logprobs, captured logprobs and advantages of all trained tokens of a session -> the loss of each token."""


def ppo(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return the clipped ratio of each token (arXiv:1707.06347, equation 7)."""
    ratio = (logprobs - captured).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def tis(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return an on-policy loss, times the truncated ratio of trainer and sampler (as TRL and verl have TIS)."""
    return -(logprobs - captured).detach().exp().clamp(max=TRUNCATE_AT) * advantages * logprobs


def gspo(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return the clipped geometric mean of the ratios of all tokens (arXiv:2507.18071, equations 5 and 7). Its gradient
    reaches each token by the token's own advantage (equations 13 and 14)."""
    return ppo(logprobs, (logprobs - (logprobs - captured).mean()).detach(), advantages)


def kl(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return `ppo`, and the estimator k3 of the divergence from the sampler (arXiv:2402.03300, equation 4)."""
    change = logprobs - captured
    return ppo(logprobs, captured, advantages) + KL_COEFFICIENT * ((-change).exp() + change - 1)


LOSSES: Mapping[str, TokenLoss] = {"ppo": ppo, "tis": tis, "gspo": gspo, "kl": kl}

Ranks = list[list[list[Row]]]
"""Rank -> micro-batch -> rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of a trainer."""

    ranks: Ranks
    loss: str
    weighting: Weighting
    pad_id: int = 0
    length_multiple_of: int = 1
    """Rows are padded to a multiple of this length."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The relative difference between the gradient of one step and the right one."""

    loss: str
    weighting: Weighting
    split: str
    difference: float


Adapter = Callable[[Any, Step], None]


def check(
    adapter: Adapter,
    model: Any,
    *,
    vocabulary: int,
    losses: Mapping[str, TokenLoss] = LOSSES,
    weightings: Sequence[Weighting] = get_args(Weighting),
    seed: int = 0,
    turn_advantages: bool = False,
) -> list[Finding]:
    """Return one finding for each loss, weighting and split. `seed` chooses the sessions and the splits; their ids are
    below `vocabulary`. `turn_advantages`: each call has an advantage of its own. Raises `ValueError` for a model that
    is not in float64."""
    if kinds := {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float64"}:
        raise ValueError(f"the model has parameters of {', '.join(kinds)}: call model.double() first")
    traces = _example_traces(model, vocabulary, seed, turn_advantages)
    findings = []
    for loss, weighting in product(losses, weightings):
        model.zero_grad(set_to_none=True)
        _whole_sessions(model, traces, losses[loss], weighting)
        right = _gradient(model)
        for split, (ranks, multiple) in _splits(weighted(traces, weighting), seed).items():
            step = Step(ranks=ranks, loss=loss, weighting=weighting, length_multiple_of=multiple)
            model.zero_grad(set_to_none=True)
            adapter(model, step)
            difference = (_gradient(model) - right).norm() / right.norm()
            findings.append(Finding(loss, weighting, split, float(difference)))
    return findings


def holds(findings: Sequence[Finding]) -> bool:
    """Return whether no finding is above the tolerance."""
    return all(finding.difference < TOLERANCE for finding in findings)


def train_arrays(model: Any, step: Step) -> None:
    """Run one step on the arrays of `padded`, with one of `LOSSES`."""
    batches = [
        to_torch(padded(rows, step.pad_id, length_multiple_of=step.length_multiple_of))
        for micro_batches in step.ranks
        for rows in micro_batches
    ]
    changes = _session_changes(model, batches) if step.loss == "gspo" else {}
    for batch in batches:
        logprobs = token_logprobs(model, batch["input_ids"], batch["attention_mask"])
        loss, captured = LOSSES[step.loss], batch["old_logprobs"]
        if step.loss == "gspo":  # the gradient of the session's mean, one token at a time: equation 14 of the paper
            of_rows = logprobs.new_tensor([changes[number] for number in batch["session_ids"].tolist()])
            loss, captured = ppo, logprobs.detach() - of_rows[:, None]
        (batch["weights"] * loss(logprobs, captured, batch["advantages"])).sum().backward()


def _session_changes(model: Any, batches: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the mean change of a token's logprob for each session: over all rows, micro-batches and ranks."""
    torch: Any = importlib.import_module("torch")
    changes: defaultdict[int, float] = defaultdict(float)
    for batch in batches:
        with torch.no_grad():
            logprobs = token_logprobs(model, batch["input_ids"], batch["attention_mask"])
        of_rows = ((logprobs - batch["old_logprobs"]) * batch["loss_mask"]).sum(-1) / batch["session_tokens"].clamp(1)
        for number, change in zip(batch["session_ids"].tolist(), of_rows.tolist(), strict=True):
            changes[number] += change
    return changes


def token_logprobs(model: Any, input_ids: Any, attention_mask: Any) -> Any:
    """Return the logprob of each token at its own position; 0.0 for the first."""
    torch: Any = importlib.import_module("torch")
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def _whole_sessions(model: Any, traces: Sequence[Row], loss: TokenLoss, weighting: Weighting) -> None:
    """Run one step on whole sessions: each trace alone, each weight from the definition."""
    torch: Any = importlib.import_module("torch")
    sessions: defaultdict[str, list[Row]] = defaultdict(list)
    for trace in traces:
        sessions[trace.session_id].append(trace)
    all_tokens = sum(trace.trainable_tokens for trace in traces)
    for own in sessions.values():
        logprobs = torch.cat([_trained_logprobs(model, trace) for trace in own])
        captured = torch.cat([torch.from_numpy(trace.logprobs[trace.loss_mask == 1]) for trace in own])
        advantages = [
            trace.call_advantages.get(turn.call_id, trace.advantage)
            for trace in own
            for turn in trace.turns
            for _ in range(turn.start, turn.end)
        ]
        total = loss(logprobs, captured.double(), logprobs.new_tensor(advantages)).sum()
        (total / (all_tokens if weighting == "token" else len(sessions) * len(logprobs))).backward()


def _trained_logprobs(model: Any, trace: Row) -> Any:
    torch: Any = importlib.import_module("torch")
    ids = torch.from_numpy(trace.token_ids.astype(np.int64))[None]
    return token_logprobs(model, ids, torch.ones_like(ids))[0][torch.from_numpy(trace.loss_mask == 1)]


def _gradient(model: Any) -> Any:
    """Return the gradient of all parameters, as one vector."""
    torch: Any = importlib.import_module("torch")
    parameters = list(model.parameters())
    return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters])


def _example_traces(model: Any, vocabulary: int, seed: int, turn_advantages: bool) -> list[Row]:
    """Return rows of six sessions with one to four traces each: turns of context and sampled tokens. The captured
    logprobs are the model's with noise, so that ratios are on both sides of the clip."""
    torch: Any = importlib.import_module("torch")
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for session in range(6):
        advantage, drift = float(np.float32(random.normal())), random.normal(0, CLIP)
        for trace in range(random.integers(1, 5)):
            lengths = random.integers(1, 6, size=(random.integers(1, 5), 2))
            mask = np.concatenate([np.repeat([0, 1], turn) for turn in lengths]).astype(np.int8)
            ends = lengths.sum(1).cumsum()
            turns = [
                Turn(call_id=f"{session}/{trace}/{end}", start=end - length, end=end)
                for end, length in zip(ends.tolist(), lengths[:, 1].tolist(), strict=True)
            ]
            row = replace(
                inert_row(),
                token_ids=random.integers(0, vocabulary, len(mask)).astype(np.int32),
                prompt_length=int(lengths[0, 0]),
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                weights=np.zeros(len(mask), np.float32),
                advantage=advantage,
                session_id=f"session{session}",
                group_id=f"task{session % 2}",
                trace_id=f"session{session}/{trace}",
                turns=turns,
                call_advantages={turn.call_id: advantage + turn.end / 8 for turn in turns} if turn_advantages else {},
            )
            with torch.no_grad():
                own = _trained_logprobs(model, row).numpy()
            row.logprobs[mask == 1] = own + drift + random.normal(0, CLIP, len(own))
            rows.append(row)
    return rows


def cut(row: Row, places: Sequence[int]) -> list[Row]:
    """Return rows that train together the tokens of `row`. Each ends at one of the places, and trains its tokens after
    the place before: as a builder makes them that finds no prefix in common."""
    pieces = []
    for start, end in pairwise([0, *sorted(places), len(row.token_ids)]):
        piece = first_tokens(row, end)
        own = np.arange(end) >= start
        piece = replace(
            piece, loss_mask=piece.loss_mask * own, logprobs=piece.logprobs * own, weights=piece.weights * own
        )
        pieces += [piece] if piece.trainable_tokens else []
    return pieces


def _splits(traces: Sequence[Row], seed: int) -> dict[str, tuple[Ranks, int]]:
    """Return ways to lay the traces out, each with the multiple that rows are padded to."""
    random = np.random.default_rng(seed)
    rows = [piece for row in traces for piece in cut(row, random.integers(1, len(row.token_ids), size=2).tolist())]
    shuffled = [rows[place] for place in random.permutation(len(rows))]
    return {
        "a row per trace": ([[list(traces)]], 1),
        "longer padding": ([[list(traces)]], 64),
        "traces cut into rows": ([[rows]], 1),
        "uneven micro-batches": ([_parts(shuffled, 4, random)], 1),
        "uneven ranks": ([_parts(part, 2, random) for part in _parts(shuffled, 3, random)], 8),
    }


def _parts(rows: Sequence[Row], number: int, random: np.random.Generator) -> list[list[Row]]:
    """Return the rows in so many parts of random sizes; a part without rows gets an inert one."""
    places = np.sort(random.integers(0, len(rows) + 1, number - 1)).tolist()
    return [list(rows[start:end]) or [inert_row()] for start, end in pairwise([0, *places, len(rows)])]
