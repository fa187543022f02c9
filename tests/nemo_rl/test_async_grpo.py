# pyright: reportMissingImports=false
"""NeMo RL's real `async_grpo_train`, collector and replay buffer, on answers of sessions that a refit overtakes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from polar_gym.engines.weights import spans
from tests.support.nemo_rl_cases import COMPACTED, DELEGATED, OTHER_TASK, PLAIN, Sample

TASKS = (
    Sample(COMPACTED, 1.0),
    Sample(DELEGATED, 0.0),
    *(Sample(OTHER_TASK, reward, task="t2") for reward in (1.0, 0)),
)


@pytest.fixture(scope="module")
def asynchronous(trainer: Any) -> Iterator[Any]:
    """`tests.nemo_rl.async_trainer`, with Ray."""
    module = importlib.import_module("tests.nemo_rl.async_trainer")
    with module.cluster():
        yield module


def test_asynchronous_steps_train_all_traces_like_a_synchronous_one(trainer: Any, asynchronous: Any) -> None:
    expected = trainer.train(TASKS, "grpo_codex_all_traces", ranks=4)
    found = asynchronous.train(TASKS, "grpo_codex_async", steps=3, ranks=4)
    assert len(found.steps) == 3
    for step in found.steps:
        assert sorted(step.rows(), key=str) == sorted(expected.rows(), key=str)
        assert (step.gradient - expected.gradient).norm() <= 1e-6 * expected.gradient.norm()
    assert {name: len(column) for name, column in found.logged.items() if len(column) != 12} == {}
    overtaken = found.batches[2]
    assert found.batches[:3] == [(0, 0), (0, 0), (1, 2)], "a refit does not wait for sessions"
    assert found.ages == [0, 1, 1], "NeMo RL counts from the weights at the start of a session"
    (span,) = spans([], *map(str, overtaken), tokens=3)
    assert (span.version, span.until) == ("1", "2"), "and our oldest version is the same"


def test_truncated_sessions_are_truncated_in_the_replay_buffer_too(asynchronous: Any) -> None:
    step = (Sample(COMPACTED, 1.0), Sample(PLAIN, 0.0, truncated_by="time"))
    main_trace = ("grpo.gym_multi_trace=false", "grpo.overlong_filtering=true")
    (found,) = asynchronous.train(step, "grpo_codex_async", *main_trace, steps=1).steps
    assert found.data["sample_mask"].tolist() == [1, 0]


def test_a_group_that_is_too_old_is_not_sampled(trainer: Any) -> None:
    buffers: Any = importlib.import_module("nemo_rl.algorithms.async_utils.replay_buffer")
    buffer = buffers.ReplayBufferImpl(max_size=2, drop_incomplete_targets_on_restore=False)
    for version in (0, 1):
        buffer.add({}, weight_version=version, target_weight_version=2)
    sample = buffer.sample(num_prompt_groups=1, current_weight_version=2, max_age_steps=1)
    assert (sample["avg_trajectory_age"], buffer.size()) == (1, 0)
