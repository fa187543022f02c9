"""What the run page knows of an episode: one flat row, small enough that thousands are in memory at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from polar_gym.schema import Episode, ModelCall, Trajectory


def summary(source: str, episode: Episode, trajectory: Trajectory, calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the row of an episode with the traces of `trajectory`. `calls`: none where their journal is not known."""
    session, fidelity = episode.session, trajectory.fidelity
    own = [call for call in calls if call.replayed is None]
    return {
        "source": source,
        "session": session.session_id,
        "attempt": session.attempt,
        "task": session.task_id,
        "group": episode.group,
        "sample": session.sample_index,
        "harness": session.harness,
        "model": episode.engine.model,
        "scripted": episode.engine.scripted,
        "builder": trajectory.builder,
        "branched": next((trace.branched_from for trace in trajectory.traces if trace.branched_from), None),
        "shared": max((trace.shared_prefix for trace in trajectory.traces), default=0),
        "status": session.status,
        "truncated": session.truncated_by,
        "failure": session.failure and session.failure.model_dump(mode="json"),
        "reward": episode.reward,
        "resolved": episode.evaluation and episode.evaluation.resolved,
        "node": session.node,
        "version": session.weight_version,
        "staleness": session.staleness,
        "timing": list(session.timing.stages().values()),
        "started": min((call.started_at for call in own), default=None),
        "calls": fidelity.calls,
        "kinds": fidelity.traces_by_kind,
        "sampled": fidelity.sampled_tokens,
        "trainable": fidelity.trainable_tokens,
        "excluded": fidelity.excluded,
        "unsent": fidelity.unsent,
        "spliced": fidelity.spliced,
        "canonical": fidelity.canonical,
        "breaks": [[broken.cause, broken.position] for broken in fidelity.breaks],
        "tools": [[*key, count] for key, count in _tools(trajectory).items()],
        "latency": [round(call.duration, 3) for call in own],
        "prefill": fidelity.prefill,
        "prompt": sum(len(call.prompt_ids) for call in calls) or None,
        "tokens": sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in trajectory.traces),
    }


def _tools(trajectory: Trajectory) -> Counter[tuple[str, str]]:
    return Counter((attempt.name or "?", attempt.status) for attempt in trajectory.tool_attempts)
