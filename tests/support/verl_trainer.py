"""The adapter for the check of the packing that runs verl's code: its record, the agent loop worker of the trainer V1,
its synthetic rows, and its policy loss.

verl (0.9.1) asks for older packages than vLLM's, and is tried without them, beside torch:

    pip install --no-deps verl==0.9.1 codetiming dill msgpack peft pyvers ray tensordict torchdata TransferQueue

The worker's queue is a list here, and the forward pass is that of the model under test: a real queue needs Ray, and
verl's engines need `torch.distributed`. The trainer V1 holds rows without padding, so that longer padding changes
nothing.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

from polar_gym.training import Row
from polar_gym.training.conformance import CLIP, KL_COEFFICIENT, TRUNCATE_AT, Step, token_logprobs
from polar_gym.training.verl import agent_loop_outputs

LOSS_MODES = {"gspo": "gspo"}
AGGREGATIONS = {"token": "token-mean", "session": "seq-mean-token-mean"}
"""verl's own nearest form: the second is over rows."""
STEP = 7

Fields = dict[str, Any]


def queued(rows: Sequence[Row], uid: str = "task", session: int = 0) -> tuple[list[str], list[Fields], list[Fields]]:
    """Return keys, fields and tags of a session's rows, as the worker of verl's trainer V1 puts them on its queue."""
    loop: Any = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    module: Any = importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq")
    put: Fields = {"keys": [], "fields": [], "tags": []}

    async def keep(**batch: Any) -> None:
        put.update(batch)

    outputs = [loop.AgentLoopOutput(**output) for output in agent_loop_outputs(rows, (STEP, STEP))]
    kind = module.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = object.__new__(kind)
    worker.reward_loop_worker_handles, worker.processor, worker.distillation_enabled = None, None, False
    queue, module.tq = module.tq, SimpleNamespace(async_kv_batch_put=keep)
    try:
        own = {"uid": uid, "session_id": session, "global_steps": STEP}
        asyncio.run(worker._agent_loop_postprocess(outputs, validate=False, **own))
    finally:
        module.tq = queue
    return put["keys"], [dict(row.items()) for row in put["fields"]], put["tags"]


def verl(model: Any, step: Step) -> None:
    """Run one optimizer step of verl: all rows are one mini-batch."""
    padding: Any = importlib.import_module("verl.trainer.ppo.padding_utils")
    by_row = _queued_rows(row for rank in step.ranks for part in rank for row in part if not row.inert)
    fields, tag = next(iter(by_row.values()))
    inert, _ = padding.construct_minimal_padding_template(fields, tag, eos_token_id=0)
    config = _actor_config(step)
    tokens = sum(int(fields["loss_mask"].sum()) for fields, _ in by_row.values())
    rows = sum(max(len(part), 1) for rank in step.ranks for part in rank)
    numbers = {"dp_size": len(step.ranks), "batch_num_tokens": tokens, "global_batch_size": rows}
    for part in chain(*step.ranks):
        ready = [(row, inert if row.inert else by_row[id(row)][0]) for row in part]
        _backward(model, step, config, _micro_batch(ready, step), numbers)


def verl_mini_batches_of_eight(model: Any, step: Step) -> None:
    """Run verl with `ppo_mini_batch_size * rollout.n` of eight: an optimizer step for each eight rows."""
    rows = list(chain(*chain(*step.ranks)))
    for start in range(0, len(rows), 8):
        model.zero_grad()
        verl(model, replace(step, ranks=[[rows[start : start + 8]]]))


def _queued_rows(rows: Iterable[Row]) -> dict[int, tuple[Fields, Fields]]:
    """Return the fields and the tag of each row."""
    sessions: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sessions[row.session_id].append(row)
    found = {}
    for name, own in sessions.items():
        _, fields, tags = queued(own, name)
        found.update(zip(map(id, own), zip(fields, tags, strict=True), strict=True))
    return found


def _micro_batch(rows: Sequence[tuple[Row, Fields]], step: Step) -> Fields:
    """Return what the loss reads of each row, as verl's trainer has it after the advantages. Our advantages are in the
    place of verl's, which are the group's."""
    torch: Any = importlib.import_module("torch")
    names = ("prompts", "responses", "input_ids", "response_mask", "loss_mask", "rollout_log_probs")
    lists = {name: [fields[name] for _, fields in rows] for name in names}
    lists["old_log_probs"] = lists["ref_log_prob"] = lists["rollout_log_probs"]
    lists["advantages"] = [row.advantage * fields["response_mask"].double() for row, fields in rows]
    return {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in lists.items()}


def _backward(model: Any, step: Step, config: Any, batch: Fields, numbers: Fields) -> None:
    torch: Any = importlib.import_module("torch")
    losses: Any = importlib.import_module("verl.workers.utils.losses")
    dictionaries: Any = importlib.import_module("verl.utils.tensordict_utils")
    own = [token_logprobs(model, ids[None], torch.ones_like(ids[None]))[0] for ids in batch["input_ids"].unbind()]
    logprobs = torch.nested.as_nested_tensor([each.roll(-1) for each in own], layout=torch.jagged)
    if step.loss == "tis":
        batch |= _corrected(own, batch)
    data = dictionaries.get_tensordict(batch, numbers)
    loss, _ = losses.ppo_loss(config, {"log_probs": logprobs}, data)
    (loss / numbers["dp_size"]).backward()  # FSDP takes the mean over ranks


def _corrected(own: Sequence[Any], batch: Fields) -> Fields:
    """Return the trainer's own logprobs as the old ones, and verl's truncated weights of the sampler's."""
    torch: Any = importlib.import_module("torch")
    helper: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    masks = batch["response_mask"]
    old = [each.detach()[-len(mask) :] for each, mask in zip(own, masks.unbind(), strict=True)]
    old = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    weights, _, _ = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=old.to_padded_tensor(0.0),
        rollout_log_prob=batch["rollout_log_probs"].to_padded_tensor(0.0),
        response_mask=masks.to_padded_tensor(0),
        rollout_is="token",
        rollout_is_threshold=TRUNCATE_AT,
    )
    rows = [row[: len(mask)] for row, mask in zip(weights.batch["rollout_is_weights"], masks.unbind(), strict=True)]
    return {"old_log_probs": old, "rollout_is_weights": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}


def _actor_config(step: Step) -> Any:
    configs: Any = importlib.import_module("verl.workers.config")
    return configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        clip_ratio_c=1e9,  # no dual clip
        loss_agg_mode=AGGREGATIONS[step.weighting],
        policy_loss=configs.PolicyLossConfig(loss_mode=LOSS_MODES.get(step.loss, "vanilla")),
        use_kl_loss=step.loss == "kl",
        kl_loss_coef=KL_COEFFICIENT,
        kl_loss_type="low_var_kl",
    )
