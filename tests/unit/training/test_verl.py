"""The form of verl; its own code obeys the law of the packing, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from polar_gym.training import make_batch
from polar_gym.training.conformance import LOSSES, check, holds
from polar_gym.training.verl import agent_loop_outputs
from tests.support import verl_trainer
from tests.support.calls import make_call
from tests.support.choices import experts, recorded_episode
from tests.support.episodes import forked, make_episode

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not here; see tests/support/verl_trainer.py"
)


@needs_verl
def test_verl_obeys_the_law_in_one_mini_batch(tiny_gpt2: Any) -> None:
    """verl's ratio of GSPO is that of a row, and so are its means."""
    findings = check(verl_trainer.verl, tiny_gpt2, vocabulary=32)
    broken = {(finding.loss, finding.weighting) for finding in findings if not holds([finding])}
    assert broken == {("gspo", "token"), *((loss, "session") for loss in LOSSES)}, findings


@needs_verl
def test_one_mini_batch_may_hold_more_rows_than_sessions() -> None:
    """Guards the way out that `polar_gym.training.verl` names: without it, rows add optimizer steps."""
    configs: Any = importlib.import_module("verl.workers.config")
    sizes = {"strategy": "fsdp", "rollout_n": 1, "ppo_mini_batch_size": 512, "ppo_micro_batch_size_per_gpu": 1}
    configs.ActorConfig(**sizes, use_dynamic_bsz=True).validate(n_gpus=1, train_batch_size=4)
    with pytest.raises(ValueError, match=r"train_batch_size \(4\) must be >= actor.ppo_mini_batch_size \(512\)"):
        configs.ActorConfig(**sizes).validate(n_gpus=1, train_batch_size=4)


@needs_verl
def test_verl_gives_every_row_the_advantage_of_its_session() -> None:
    """One vote for a session of three traces and for one that is too long, none for a session without a reward."""
    protocol: Any = importlib.import_module("verl.protocol")
    utils: Any = importlib.import_module("verl.trainer.ppo.v1.utils")
    torch: Any = importlib.import_module("torch")
    episodes = [
        make_episode("forked", 1.0, forked(3), task_id="task"),
        make_episode("short", 0.0, [make_call(0, [1], [5, 6])], task_id="task"),
        make_episode("half", 0.5, [make_call(0, [1, 2], [3])], task_id="task"),
        make_episode("long", 0.0, [make_call(0, [1], list(range(20, 60)))], task_id="task"),
        make_episode("failed", None, [make_call(0, [1], [7])], task_id="task"),
    ]
    settings: dict[str, Any] = {"max_tokens": 32, "overlong": "mask"}
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    for session, episode in enumerate(episodes):
        own_keys, fields, _ = verl_trainer.queued(make_batch([episode], **settings).rows, "task", session)
        keys, rows = keys + own_keys, rows + fields

    def padded(name: str) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    data = protocol.DataProto.from_single_dict(
        {
            "response_mask": padded("response_mask"),
            "token_level_rewards": padded("rm_scores"),
            "uid": np.array(["task"] * len(rows), dtype=object),
        }
    )
    found = utils.compute_advantage_for_multi_trajectories(data, keys, "grpo", norm_adv_by_std_in_grpo=False)
    expected = [row.advantage if row.trainable_tokens else 0.0 for row in make_batch(episodes, **settings).rows]
    assert keys == ["task_0_0", "task_0_1", "task_0_2", "task_1_0", "task_2_0", "task_3_0"]
    trained = found.batch["response_mask"].argmax(1, keepdim=True)
    advantages = found.batch["advantages"].gather(1, trained)[:, 0].tolist()
    assert advantages == pytest.approx(expected)


def test_an_output_is_the_row_cut_behind_the_prompt() -> None:
    (row,) = make_batch([recorded_episode()]).rows
    (output,) = agent_loop_outputs([row], (3, 4))
    assert (output["prompt_ids"], output["response_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert output["response_mask"] == [1, 0, 1, 1]
    assert output["response_logprobs"] == row.logprobs[2:].tolist()
    assert output["reward_score"] == 1.0
    assert output["routed_experts"].tolist() == experts([1, 2, 3, 4, 5]).tolist()
    steps = [output["extra_fields"][name] for name in ("min_global_steps", "max_global_steps")]
    assert steps == [3, 4]


def test_a_row_that_trains_nothing_has_no_output_beside_one_that_does() -> None:
    """Guards against such a row in the last place: verl reads the session's advantage there."""
    calls = [make_call(0, [1], [2]), make_call(1, [5, 6], [7])]
    batch = make_batch([make_episode("a", 1.0, calls)], max_tokens=2, overlong="mask")
    assert len(batch.rows) == 2
    (output,) = agent_loop_outputs(batch.rows, (0, 0))
    assert (output["response_ids"], output["response_mask"]) == ([2], [1])


@pytest.mark.parametrize(("max_tokens", "ids"), [(3, ([1, 2], [3])), (2, ([1], [2]))])
def test_a_session_that_trains_nothing_votes_all_the_same(max_tokens: int, ids: tuple[list[int], list[int]]) -> None:
    """Guards against a mean over the short sessions alone, and against a response without a token for the reward."""
    settings: dict[str, Any] = {"max_tokens": max_tokens, "overlong": "mask", "multiple_of": 2}
    batch = make_batch([make_episode("a", 0.5, [make_call(0, [1, 2], [3, 4])])], **settings)
    (output,) = agent_loop_outputs(batch.rows, (0, 0))
    assert (output["prompt_ids"], output["response_ids"]) == ids
    assert (output["response_mask"], output["response_logprobs"]) == ([0], [0.0])
    assert output["reward_score"] == 0.5
    failed = make_batch([make_episode("b", None, [make_call(0, [1, 2], [3, 4])])], **settings)
    assert agent_loop_outputs(failed.rows, (0, 0)) == [], "a session without a reward has no vote"
