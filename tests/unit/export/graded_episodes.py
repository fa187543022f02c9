"""Episodes whose tests were graded, for the tests of exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from polar_gym.schema import (
    EngineInfo,
    Episode,
    EvaluationResult,
    Fidelity,
    Sampling,
    Trace,
    Trajectory,
)
from tests.support.episodes import make_episode

SAMPLING = Sampling(temperature=0.7).model_dump(exclude={"seed"})
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


MESSAGES = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it."}]},
    {"role": "assistant", "content": None, "reasoning": "Look first.", "tool_calls": [call('{"command": "ls"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
    {"role": "assistant", "content": "Done."},
]


def row_groups(file: Path) -> list[int]:
    """Return the number of rows of each row group of a Parquet file."""
    written = pq.ParquetFile(file).metadata
    return [written.row_group(place).num_rows for place in range(written.num_row_groups)]


def make_trace(name: str = "s", ids: int = 1, **changes: Any) -> Trace:
    return Trace.model_validate(
        {
            "trace_id": f"{name}/c2",
            "session_id": name,
            "prompt_ids": [ids, 2, 3],
            "response_ids": [4, 5, 6, 7],
            "loss_mask": [1, 1, 0, 1],
            "logprobs": [-0.5, -0.5, 0.0, -0.5],
            "messages": MESSAGES,
            "tools": [TOOL],
            "call_ids": ["c1", "c2"],
            "reward": 1.0,
            "sampling": SAMPLING,
            **changes,
        }
    )


def graded_episode(name: str = "s", *, tests: dict[str, str] | None = None, **changes: Any) -> Episode:
    """Return an episode of a real engine with one trace, whose tests had these statuses."""
    tests = {"a": "PASSED", "b": "PASSED"} if tests is None else tests
    resolved = set(tests.values()) <= {"PASSED"}
    graded: dict[str, Any] = {
        "reward": float(resolved),
        "repo": "polar/intervals",
        "engine": EngineInfo(name="vllm", model="m", max_model_len=100),
        "trajectory": Trajectory(builder="prefix_merging", traces=[make_trace(name)], fidelity=Fidelity()),
        "evaluation": EvaluationResult(evaluator="swe", reward=float(resolved), resolved=resolved, tests=tests),
    }
    return make_episode(name, task_id="t", **graded | changes)


def with_traces(name: str, *traces: Trace, **changes: Any) -> Episode:
    trajectory = Trajectory(builder="prefix_merging", traces=list(traces), fidelity=Fidelity())
    return graded_episode(name, trajectory=trajectory, **changes)
