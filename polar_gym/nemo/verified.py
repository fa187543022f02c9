"""Makes the answer of `/run`: an episode, or the reason for a missing episode, as a NeMo Gym verify response.

NeMo Gym reads the mask at the top level, NeMo RL reads it in `instance_config`. The mask is set in both. Top-level
numbers become metrics of the run. Everything here is plain data; `app.py` gives it NeMo Gym's types.

NeMo RL takes a masked sample out of the loss, but not out of its group. If a masked sample kept its tokens, its reward
of 0 would move the advantages of the samples that are not masked. Therefore its only tokens are `PLACEHOLDER`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from polar_gym.nemo.envelope import trained_spans, training_traces
from polar_gym.nemo.output import main_trace, output_items
from polar_gym.providers.openai_responses.recorded import Item, message_item, response
from polar_gym.schema import Episode, ModelCall, Trace

FAILURE_KINDS = {
    "harness_error": "agent_run_error",
    "engine_error": "provider_unavailable",
    "evaluator_error": "verifier_error",
}
"""Our failure kind -> NeMo Gym's failure kind. Other kinds get a namespace: `polar:<kind>`."""

PLACEHOLDER = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
"""The tokens of a masked sample: NeMo RL ends the batch for a sample without tokens. They are made up, not sampled.

Every vocabulary has the id 0, and every prompt of a harness is longer. Therefore masked samples form one group, in
which all rewards and all advantages are 0. Wherever NeMo RL reads a sample's logprobs, it multiplies them with the
mask."""

Row = Mapping[str, Any]
"""A row of the data set, as NeMo Gym's collector sent it."""


class Mask(NamedTuple):
    """The reason why a reward does not measure the policy."""

    kind: str
    reason: str


def verified_episode(row: Row, episode: Episode, calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the answer for an episode. `calls`: all calls of the session.

    Raises `ValueError` when the traces are not fit for a trainer.
    """
    by_id = {call.call_id: call for call in calls}
    session, traces = episode.session, episode.trajectory.traces
    failed = session.failure is not None  # then nothing is trained, and the traces need not be fit for a trainer
    trace = next(iter(traces), None) if failed else main_trace(traces, by_id)
    mask = _mask(episode, trace)
    spans = trained_spans(trace, by_id) if trace is not None and mask is None else []
    answer = verified(
        row,
        mask,
        output=output_items(trace, by_id, spans) if trace is not None else [],
        response_id=session.session_id,
        created_at=calls[0].started_at if calls else 0.0,
        model=episode.engine.model,
        metadata={
            "session_id": session.session_id,
            "task_id": session.task_id,
            "harness": session.harness,
            "trace_id": trace.trace_id if trace is not None else "",
        },
        reward=episode.reward or 0.0,
    )
    metrics = _metrics(episode, sum(span.end - span.start for span in spans))
    if mask is not None:
        return {**answer, **metrics}  # without `training_traces`: a trainer that ignores the mask has nothing to train
    return {**answer, "training_traces": training_traces(episode, by_id), **metrics}


def verified(
    row: Row,
    mask: Mask | None,
    *,
    response_id: str,
    created_at: float,
    output: Sequence[Item] = (),
    model: str = "policy",
    metadata: Mapping[str, str] = MappingProxyType({}),
    reward: float = 0.0,
) -> dict[str, Any]:
    """Return the answer. With a mask, `output` has no tokens and `reward` does not count."""
    given = row.get("instance_config")
    output = [*output, *([{**message_item("masked", ""), **PLACEHOLDER}] if mask is not None else [])]
    return {
        **{key: value for key, value in row.items() if not key.startswith("_")},  # `_...` is the collector's
        "response": response(response_id, created_at, model, output, metadata),
        "reward": reward if mask is None else 0.0,
        "mask_sample": mask is not None,
        "failure_kind": mask.kind if mask else None,
        "failure_reason": mask.reason if mask else None,
        "instance_config": {**(given if isinstance(given, Mapping) else {}), "mask_sample": mask is not None},
    }


def _mask(episode: Episode, trace: Trace | None) -> Mask | None:
    failure = episode.session.failure
    if failure is not None:
        kind = FAILURE_KINDS.get(failure.kind, f"polar:{failure.kind}")
        return Mask(kind, f"{failure.stage}: {failure.message}")
    if trace is None:
        excluded = ", ".join(f"{count} {reason}" for reason, count in episode.trajectory.fidelity.excluded.items())
        return Mask("polar:nothing_to_train", f"no sampled token may be trained on; excluded: {excluded or 'none'}")
    return None


def _metrics(episode: Episode, consumed: int) -> dict[str, float]:
    """Return the metrics of an episode. `consumed`: number of tokens that a trainer of single sequences trains on."""
    fidelity, timing = episode.trajectory.fidelity, episode.session.timing
    attempts = [attempt.status for attempt in episode.trajectory.tool_attempts]
    stages = {f"seconds_{stage}": seconds for stage, seconds in timing.model_dump().items() if seconds is not None}
    verdict = episode.evaluation.resolved if episode.evaluation else None
    return {
        **({} if verdict is None else {"resolved": float(verdict)}),
        "truncated": float(episode.truncated),
        "model_calls": float(fidelity.calls),
        "traces": float(fidelity.traces),
        "sampled_tokens": float(fidelity.sampled_tokens),
        "trainable_tokens": float(fidelity.trainable_tokens),
        "excluded_tokens": float(sum(fidelity.excluded.values())),
        "spliced": float(fidelity.spliced),
        "breaks": float(len(fidelity.breaks)),
        "tool_attempts": float(len(attempts)),
        "tool_attempts_ok": float(attempts.count("ok")),
        "consumed_fraction": consumed / fidelity.sampled_tokens if fidelity.sampled_tokens else 0.0,
        **stages,
    }
