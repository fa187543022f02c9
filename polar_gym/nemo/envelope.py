"""Writes `training_traces`: every trace of a session, in the strict form proposed to NeMo Gym and NeMo RL.

Each trained call belongs to exactly one trace. The call's span covers exactly the positions at which that trace's mask
is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polar_gym.record import npy_of_array
from polar_gym.schema import Episode, ModelCall, Trace

SCHEMA_VERSION = 1


class Span(NamedTuple):
    """The positions at which a trace trains on a call, counted in the whole sequence with its prompt."""

    call_id: str
    start: int
    end: int


def trained_spans(trace: Trace, calls: Mapping[str, ModelCall]) -> list[Span]:
    """Return the spans that a trace trains on.

    Raises `ValueError` when the mask does not cover whole calls, or a logprob is not a finite number.
    """
    prompt = len(trace.prompt_ids)
    spans = []
    for call_id in trace.call_ids:
        call = calls[call_id]
        start = len(call.prompt_ids)
        span = Span(call_id, start, start + len(call.response_ids))
        if trace.loss_mask[span.start - prompt : span.end - prompt].any():
            spans.append(span)
            if not np.isfinite(call.logprobs).all():
                raise ValueError(f"call {call_id}: the engine gave a logprob that is not a finite number")
    covered = sum(span.end - span.start for span in spans)
    if covered != trace.trainable_tokens:
        raise ValueError(
            f"trace {trace.trace_id}: its calls sampled {covered} tokens, but its mask trains on "
            f"{trace.trainable_tokens}; a builder for NeMo RL must train on whole calls"
        )
    return spans


def training_traces(episode: Episode, calls: Mapping[str, ModelCall]) -> dict[str, Any]:
    """Return `training_traces`. Raises `ValueError` where a trace has no valid spans or two traces train on a call."""
    found = episode.trajectory.traces
    traces = [_trace(trace, trained_spans(trace, calls)) | {"sampling": episode.sampled_with(trace)} for trace in found]
    named = Counter(call_id for trace in traces for call_id in trace["model_call_ids"])
    if twice := sorted(call_id for call_id, times in named.items() if times > 1):
        raise ValueError(f"calls that more than one trace trains on: {', '.join(twice)}")
    rewards = episode.evaluation.call_rewards if episode.evaluation is not None else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "rollout_id": episode.session.session_id,
        "builder": episode.trajectory.builder,
        "traces": traces,
        **({"model_call_rewards": rewards} if rewards else {}),
    }


def _trace(trace: Trace, spans: Sequence[Span]) -> dict[str, Any]:
    prompt = len(trace.prompt_ids)
    return {
        "trace_id": trace.trace_id,
        "model_call_ids": [span.call_id for span in spans],
        "token_ids": [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
        "generation_logprobs": [*[0.0] * prompt, *trace.logprobs.tolist()],
        "loss_mask": [*[0] * prompt, *trace.loss_mask.tolist()],
        "sampled_spans": [{"model_call_id": span.call_id, "start": span.start, "end": span.end} for span in spans],
        **_choices(trace),
    }


def _choices(trace: Trace) -> dict[str, Any]:
    """Return the recorded choices of the sampler: experts as base64 of a .npy file, one row for each token except the
    last, and sets of kept ids for the whole sequence, as CSR."""
    choices: dict[str, Any] = {}
    if trace.routed_experts is not None:
        choices["routed_experts"] = npy_of_array(trace.routed_experts)
    if (mask := trace.whole_mask) is not None:
        choices["sampling_mask"] = {"offsets": mask.offsets.tolist(), "token_ids": mask.token_ids.tolist()}
    return choices
