"""Our answers of today, held against the rows that NeMo RL's real code trained of them when they were recorded."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polar_gym.paths import shipped_dir
from polar_gym.training import make_batch
from tests.support.nemo_rl import advantages, consumed
from tests.support.nemo_rl_cases import RECORDED, STEPS, answers_of, episodes_of, row_of

ANSWERS: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))


def ordered(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row) for row in rows)


def test_every_step_is_recorded() -> None:
    assert list(ANSWERS) == list(STEPS), "make nemo-rl NEMO_RL=DIRECTORY ARGS=record"


@pytest.mark.parametrize("name", STEPS)
def test_nemo_rl_trains_the_main_traces(name: str) -> None:
    """`tests.support.nemo_rl` restates NeMo RL's rules: they must lead to what the real code trained."""
    answers = answers_of(STEPS[name])
    rows = []
    for answer, advantage in zip(answers, advantages(answers), strict=True):
        ids, trained = [], []
        for context, sampled in consumed(answer["response"]["output"]):
            ids += [*context, *sampled]
            trained += range(len(ids) - len(sampled), len(ids))
        if not answer["mask_sample"]:
            rows.append({"ids": ids, "trained": trained, "advantage": round(advantage, 4)})
    assert rows == ANSWERS[name]["main_trace"]


@pytest.mark.parametrize("name", STEPS)
def test_nemo_rl_trains_our_rows_where_it_trains_all_traces(name: str) -> None:
    """The advantage is the session's, its group is the task, and a failure has no vote: as in `make_batch`."""
    rows = [
        {
            "ids": row.token_ids.tolist(),
            "trained": row.loss_mask.nonzero()[0].tolist(),
            "advantage": round(row.advantage, 4),
        }
        for row in make_batch(episodes_of(STEPS[name]), scale="std").rows
    ]
    assert ordered(rows) == ordered(ANSWERS[name]["all_traces"])


# recipes/nemo_rl/run_grpo.py, with small stand-ins for NeMo RL's batch and estimator ----------------------------------


class Batch(dict[str, Any]):
    """NeMo RL's `BatchedDataDict`, as far as it is used."""

    def select_indices(self, indices: Sequence[int]) -> Batch:
        chosen = {key: [value[index] for index in indices] for key, value in self.items() if isinstance(value, list)}
        return Batch({key: chosen.get(key) or value[list(indices)] for key, value in self.items()})


class Estimator:
    """NeMo RL's estimator for GRPO, with normalised rewards and without a leave-one-out baseline."""

    def compute_advantage(self, *, prompt_ids: Any, rewards: Any, mask: Any) -> Any:
        result = rewards.clone()
        for group in set(prompt_ids[:, 0].tolist()):
            of_group = prompt_ids[:, 0] == group
            centred = rewards[of_group] - rewards[of_group].mean()
            deviation = rewards[of_group].std() if of_group.sum() > 1 else 0.0
            result[of_group] = centred / (deviation + 1e-6 if deviation else 1.0)
        return result[:, None].expand(mask.shape)


@pytest.fixture
def run_grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    parts = ("algorithms", "experience", "utils", "utils.logger")
    for name in ("ray", "nemo_rl", *(f"nemo_rl.{part}" for part in parts)):
        module = ModuleType(name)
        module.__dict__.update(async_utils=None, grpo=None, rollouts=None, Logger=None)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("run_grpo", shipped_dir("recipes") / "nemo_rl" / "run_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def postprocessed(torch: Any, **arguments: Any) -> Any:
    """Return NeMo RL's batch of a step: a row for each session, from the items with tokens."""
    answers = [result["full_result"] for result in arguments["results"]]
    logs = []
    for answer in answers:
        pieces = [piece for turn in consumed(answer["response"]["output"]) for piece in turn]
        logs.append([{"token_ids": piece, "trained": place % 2} for place, piece in enumerate(pieces)])
    batch = Batch(
        message_log=logs,
        length=torch.tensor([len(log[0]["token_ids"]) for log in logs]),
        loss_multiplier=torch.ones(len(answers)),
        total_reward=torch.tensor([answer["reward"] for answer in answers]),
        truncated=torch.zeros(len(answers), dtype=torch.bool),
        mask_sample=torch.tensor([answer["mask_sample"] for answer in answers]),
    )
    return SimpleNamespace(final_batch=batch, input_ids=None)


@pytest.mark.parametrize("name", STEPS)
def test_the_run_script_makes_the_recorded_rows(run_grpo: Any, name: str) -> None:
    torch = run_grpo.torch
    answers = answers_of(STEPS[name])
    given = {
        "nemo_gym_rows": [row_of(sample) for sample in STEPS[name]],
        "results": [{"full_result": answer} for answer in answers],
    }
    done = run_grpo.postprocess(lambda **arguments: postprocessed(torch, **arguments), every=True, **given)
    batch = run_grpo.with_all_traces(done.final_batch, multiple_of=4)
    found = run_grpo.SessionAdvantages(Estimator()).compute_advantage(
        rewards=batch["total_reward"], mask=torch.ones(len(batch["message_log"]), 2), repeated_batch=batch
    )
    trained = []
    for place, log in enumerate(batch["message_log"]):
        ids, mask = [], []
        for message in log:
            ids += list(message["token_ids"])
            mask += [message.get("trained", "generation_logprobs" in message)] * len(message["token_ids"])
        if batch["loss_multiplier"][place] and not batch["mask_sample"][place]:
            places = [place for place, value in enumerate(mask) if value]
            row = {"ids": list(map(int, ids)), "trained": places, "advantage": round(found[place, 0].item(), 4)}
            trained.append(row)
    assert trained == ANSWERS[name]["all_traces"]
    assert len(batch["message_log"]) % 4 == 0
    assert batch["truncated"].any() == (name == "truncated")
    assert not any("training_traces" in answer for answer in answers), "NeMo RL would log them"
