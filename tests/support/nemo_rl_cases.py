"""Steps of GRPO as NeMo RL takes them: small sessions, and the answers of `/run` for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polar_gym.nemo.verified import verified_episode
from polar_gym.schema import Episode, ModelCall
from tests.support.calls import make_call
from tests.support.episodes import make_episode

FIRST = make_call(0, [1, 2], [3, 4])
PLAIN = (FIRST, make_call(1, [1, 2, 3, 4, 5], [6]))
COMPACTED = (
    *PLAIN,
    make_call(2, [1, 2, 3, 4, 5, 6, 7], [8], hints={"kind": "compaction"}),
    make_call(3, [1, 2, 70], [71] * 9),
)
DELEGATED = (FIRST, make_call(1, [30, 31], [32] * 9, hints={"kind": "subagent"}))
NEXT_DAY = (make_call(0, [1, 99], [3, 4]),)
"""The harness wrote another date into its first prompt."""
OTHER_TASK = (make_call(0, [1, 20], [21]), make_call(1, [1, 20, 21, 22], [23]), make_call(2, [1, 24], [25, 26]))
BENT = (make_call(0, [1, 2], [3, 4], sampling_mismatch=["tool_choice"]), PLAIN[1])
"""The first answer is not trained, therefore the first trained prompt is another."""

RECORDED = Path(__file__).parents[1] / "unit" / "nemo" / "nemo_rl_answers.json"
"""The rows that NeMo RL's real `grpo_train` trained of each step: `python -m tests.nemo_rl.record` writes the file."""


@dataclass(frozen=True)
class Sample:
    calls: Sequence[ModelCall]
    reward: float | None
    """None: the session failed."""
    task: str = "t1"
    truncated_by: Literal["time"] | None = None


STEPS: dict[str, tuple[Sample, ...]] = {
    "plain": (Sample(PLAIN, 1.0), Sample(PLAIN, 0.0)),
    "compaction": (Sample(PLAIN, 1.0), Sample(COMPACTED, 0.0)),
    "sub-agent": (Sample(PLAIN, 1.0), Sample(DELEGATED, 0.0)),
    "midnight": (Sample(PLAIN, 1.0), Sample(NEXT_DAY, 0.0)),
    "first answer not trained": (Sample(PLAIN, 1.0), Sample(BENT, 0.0)),
    "failure": (Sample(PLAIN, 1.0), Sample(COMPACTED, 1.0), Sample(PLAIN, None)),
    "truncated": (Sample(PLAIN, 1.0), Sample(PLAIN, 0.0, truncated_by="time")),
    "two tasks": (
        Sample(COMPACTED, 1.0),
        Sample(DELEGATED, 0.0),
        Sample(OTHER_TASK, 1.0, task="t2"),
        Sample(OTHER_TASK, 0.0, task="t2"),
        Sample(OTHER_TASK, None, task="t2"),
    ),
}


def row_of(sample: Sample) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Solve {sample.task}."}]},
        "verifier_metadata": {"instance_id": sample.task},
        "agent_ref": {"type": "responses_api_agents", "name": "polar_swe_agent"},
    }


def episodes_of(step: Sequence[Sample]) -> list[Episode]:
    return [
        make_episode(f"s{place}", each.reward, each.calls, task_id=each.task, truncated_by=each.truncated_by)
        for place, each in enumerate(step)
    ]


def answers_of(step: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        verified_episode(row_of(sample), episode, list(sample.calls))
        for sample, episode in zip(step, episodes_of(step), strict=True)
    ]
