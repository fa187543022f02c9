# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# NeMo RL's environment runs this file. polar-gym's development environment does not have NeMo RL.
"""Run GRPO with NeMo RL, and train every trace of a session where the config says so: `grpo.gym_multi_trace: true`.

    uv run "$(polar-gym nemo-recipes)/run_grpo.py" --config "$(polar-gym nemo-recipes)/grpo_codex_all_traces.yaml"

This starts NeMo RL's own `examples/nemo_gym/run_grpo_nemo_gym.py`, with some functions of NeMo RL replaced. Written for
commit 7ea279a (2026-08-22). The file needs NeMo RL only, because `uv run` does not install polar-gym beside NeMo RL.

With every config:

- a session that ran out of time or budget is `truncated` for NeMo RL too (`grpo.overlong_filtering` takes such sessions
  out of the loss);
- `val:accuracy` leaves masked sessions out, where a prompt has one validation sample.

With `grpo.gym_multi_trace`:

- each trace of `training_traces` is a row, and inert rows fill up the micro-batches of all data-parallel ranks. Until a
  step takes a session (from the replay buffer, in asynchronous GRPO), its other traces are beside its main one;
- NeMo RL's estimator gets each session once, with the sessions of one row of the data set as its group, and without
  masked sessions. All rows of a session have the session's advantage;
- one optimizer step takes all rows. The loss is the mean over all trained tokens, so that it does not depend on the
  number of rows of a session.

A NeMo RL that knows `grpo.gym_multi_trace` itself is run as it is.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import torch
from nemo_rl.algorithms import async_utils, grpo
from nemo_rl.experience import rollouts
from nemo_rl.utils.logger import Logger

SCRIPT = Path(os.environ.get("NEMO_RL", "/opt/nemo-rl")) / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
REPLACED = (
    (rollouts, "_postprocess_single_nemo_gym_group"),
    (grpo, "_create_advantage_estimator"),
    (grpo, "validate"),
    (grpo, "_apply_mask_sample_filter"),
    (async_utils, "AsyncTrajectoryCollector"),
)
TOO_OLD = "this NeMo RL trains failures with a reward of 0 in silence; use its main after 2026-07-31 (#3402)"
NO_VOTE = -1
"""The session of a row that is in no group: an inert row, or one of a masked session."""

Message = dict[str, Any]
Log = list[Message]
"""A sequence as NeMo RL takes it: messages of the `assistant` with `generation_logprobs` are trained."""


def main() -> None:
    """Run NeMo RL's script with the replacements. Exit where this NeMo RL is too old."""
    if not hasattr(rollouts, "should_mask_flagged_samples"):
        sys.exit(TOO_OLD)
    script = nemo_rls_script()
    if "gym_multi_trace" not in grpo.GRPOConfig.model_fields:
        if missing := [name for module, name in REPLACED if not hasattr(module, name)]:
            sys.exit(f"this NeMo RL has no {', '.join(missing)}: use commit 7ea279a, or its own run_grpo_nemo_gym.py")
        set_up = script.setup

        def setup(config: Any, *arguments: Any, **options: Any) -> Any:
            check(config)
            policy, *parts = set_up(config, *arguments, **options)
            install(policy, config)
            keep_metrics(next(part for part in parts if isinstance(part, Logger)))
            return policy, *parts

        script.setup = setup
    script.main()


def nemo_rls_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_grpo_nemo_gym", SCRIPT)
    if spec is None or spec.loader is None or not SCRIPT.exists():
        sys.exit(f"{SCRIPT} is missing; set NEMO_RL to a checkout of NeMo RL")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wants_all_traces(config: Any) -> bool:
    return bool(getattr(config.grpo, "gym_multi_trace", False))


def check(config: Any) -> None:
    """Exit with the settings that cannot be used with all traces, before a GPU does any work."""
    if not wants_all_traces(config):
        return
    settings, loss, policy = config.grpo, config.loss_fn, config.policy
    sessions = settings.num_prompts_per_step * settings.num_generations_per_prompt
    scheduler = (policy.get("megatron_cfg") or {}).get("scheduler") or {}
    megatron = bool((policy.get("megatron_cfg") or {}).get("enabled"))
    bad = {
        "grpo.use_dynamic_sampling=true": settings.use_dynamic_sampling,
        "grpo.reward_shaping.enabled=true": settings.reward_shaping.enabled,
        f"grpo.adv_estimator.name={settings.adv_estimator.name}: use grpo": settings.adv_estimator.name != "grpo",
        "loss_fn.token_level_loss=false: the mean over rows counts a session once for each trace": (
            not loss.token_level_loss
        ),
        "loss_fn.sequence_level_importance_ratios=true": loss.sequence_level_importance_ratios,
        "loss_fn.truncated_importance_sampling_type=seq-mask-tis": (
            loss.truncated_importance_sampling_type == "seq-mask-tis"
        ),
        f"policy.train_global_batch_size={policy['train_global_batch_size']}: use {sessions}, one update a step": (
            policy["train_global_batch_size"] != sessions
        ),
        "policy.router_replay.enabled=true": bool((policy.get("router_replay") or {}).get("enabled")),
        "policy.megatron_cfg.scheduler: use lr_decay_style=constant and lr_warmup_iters=0; it counts rows": megatron
        and (scheduler.get("lr_decay_style") != "constant" or bool(scheduler.get("lr_warmup_iters"))),
        "data_plane.enabled=true": bool((config.data_plane or {}).get("enabled")),
    }
    if any(bad.values()):
        sys.exit(
            "grpo.gym_multi_trace cannot be used with:\n" + "\n".join(name for name, is_bad in bad.items() if is_bad)
        )


def keep_metrics(logger: Any) -> None:
    """Write the numbers that NeMo RL logs to `metrics.jsonl` in its directory of logs, too."""
    path, log_metrics = Path(logger.base_log_dir) / "metrics.jsonl", logger.log_metrics

    def log_and_keep(metrics: dict[str, Any], step: int, prefix: str = "", *rest: Any, **options: Any) -> None:
        log_metrics(metrics, step, prefix, *rest, **options)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "prefix": prefix, "metrics": numbers}) + "\n")

    logger.log_metrics = log_and_keep


def install(policy: Any, config: Any) -> None:
    """Replace NeMo RL's functions. `policy`: the object that NeMo RL trains."""
    every = wants_all_traces(config)
    replace_postprocessing(every)
    async_utils.AsyncTrajectoryCollector = collector(every)
    if config.grpo.val_num_generations_per_prompt == 1:  # else NeMo RL counts the samples of each prompt
        grpo.validate = without_masked_sessions(grpo.validate)
    if every:
        make, mask, train = grpo._create_advantage_estimator, grpo._apply_mask_sample_filter, policy.train
        grpo._create_advantage_estimator = lambda settings: SessionAdvantages(make(settings))
        micro_batch = math.lcm(config.policy["train_micro_batch_size"], config.policy["logprob_batch_size"])
        multiple = policy.data_parallel_size * micro_batch
        grpo._apply_mask_sample_filter = lambda batch: mask(with_all_traces(batch, multiple))
        policy.train = lambda data, *arguments, **options: train(data, *arguments, **{"gbs": data.size, **options})


def collector(every: bool) -> Any:
    """Return NeMo RL's collector of asynchronous GRPO, a Ray actor, with the postprocessing of its process replaced."""

    class Collector(async_utils.AsyncTrajectoryCollector.__ray_metadata__.modified_class):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            replace_postprocessing(every)
            super().__init__(*arguments, **options)

    return ray.remote(Collector)


def replace_postprocessing(every: bool) -> None:
    """Replace the function that makes NeMo RL's batch out of the answers of `/run`."""
    real = rollouts._postprocess_single_nemo_gym_group
    rollouts._postprocess_single_nemo_gym_group = lambda **given: postprocess(real, every, **given)


def postprocess(real: Callable[..., Any], every: bool, **given: Any) -> Any:
    """Return NeMo RL's batch. With `every`, it also has the group and the other traces of each session."""
    answers = [result["full_result"] for result in given["results"]]
    others = [take_other_logs(answer, count=every) for answer in answers]
    done = real(**given)
    done.final_batch["truncated"] |= torch.tensor([bool(answer.get("truncated")) for answer in answers])
    if every:
        done.final_batch["polar_others"] = others
        done.final_batch["polar_group"] = torch.tensor(groups_of(given["nemo_gym_rows"]))
        done.input_ids = done.final_batch["polar_group"][:, None]
    return done


def without_masked_sessions(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Return NeMo RL's `validate` without masked sessions: their reward of 0 says nothing about the policy."""

    def run(*arguments: Any, **options: Any) -> Any:
        training = rollouts._postprocess_single_nemo_gym_group

        def validating(**given: Any) -> Any:
            done = training(**given)
            if "mask_sample" in done.final_batch:
                kept = torch.nonzero(~done.final_batch["mask_sample"]).flatten().tolist()
                done.final_batch = done.final_batch.select_indices(kept)
            return done

        rollouts._postprocess_single_nemo_gym_group = validating
        try:
            return validate(*arguments, **options)
        finally:
            rollouts._postprocess_single_nemo_gym_group = training

    return run


def take_other_logs(answer: dict[str, Any], *, count: bool) -> list[Log]:
    """Take `training_traces` out of an answer of `/run`, because NeMo RL logs the rest of the answer. Return the traces
    that are not in `response.output`. With `count`, the metric `consumed_fraction` counts them."""
    envelope = answer.pop("training_traces", None)
    if envelope is None:
        return []
    if count and answer["sampled_tokens"]:
        answer["consumed_fraction"] = answer["trainable_tokens"] / answer["sampled_tokens"]
    main = answer["response"]["metadata"]["trace_id"]
    return [log(trace) for trace in envelope["traces"] if trace["trace_id"] != main and any(trace["loss_mask"])]


def log(trace: dict[str, Any]) -> Log:
    """Return a trace as messages, cut where its loss mask changes."""
    mask = trace["loss_mask"]
    cuts = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]]
    messages = []
    for start, end in pairwise([0, *cuts, len(mask)]):
        message: Message = {"role": "user", "content": "", "token_ids": torch.tensor(trace["token_ids"][start:end])}
        if mask[start]:
            logprobs = torch.tensor(trace["generation_logprobs"][start:end])
            message |= {"role": "assistant", "generation_logprobs": logprobs}
        messages.append(message)
    return messages


def inert_log() -> Log:
    return log({"token_ids": [0, 0], "loss_mask": [0, 1], "generation_logprobs": [0.0, 0.0]})


def groups_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of each row's group. NeMo RL repeats a row of the data set once for each sample; the keys that
    begin with `_` are added later."""
    names = [json.dumps({key: row[key] for key in sorted(row) if not key.startswith("_")}) for row in rows]
    return [int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") for name in names]


def with_all_traces(batch: Any, multiple_of: int) -> Any:
    """Give NeMo RL's batch a row for each trace, and inert rows up to a multiple of `multiple_of`. Return the batch.

    The rows of a session follow each other; the first is NeMo RL's own.
    """
    others = batch.pop("polar_others")
    sessions = [place for place, logs in enumerate(others) for _ in range(1 + len(logs))]
    inert = -len(sessions) % multiple_of
    rows = batch.select_indices([*sessions, *[0] * inert])
    logs = [each for own, more in zip(batch["message_log"], others, strict=True) for each in (own, *more)]
    rows["message_log"] = [*logs, *(inert_log() for _ in range(inert))]
    rows["length"] = torch.tensor([len(each[0]["token_ids"]) for each in rows["message_log"]])
    rows["polar_session"] = torch.tensor([*sessions, *[NO_VOTE] * inert])
    if "mask_sample" in rows:
        rows["polar_session"][rows["mask_sample"]] = NO_VOTE
    for name in ("total_reward", "loss_multiplier", "mask_sample", "truncated"):
        if name in rows:
            rows[name][len(sessions) :] = 0
    batch["total_reward"].set_(rows["total_reward"])  # the step has this tensor already, and wants a reward a row
    batch.update(rows)
    return batch


class SessionAdvantages:
    """NeMo RL's estimator of advantages, asked once for each session."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def compute_advantage(self, *, rewards: Any, mask: Any, repeated_batch: Any, **unused: Any) -> Any:
        """Return the advantages, in the shape of `mask`; 0 in rows without a vote."""
        first: dict[int, int] = {}
        for row, session in enumerate(repeated_batch["polar_session"].tolist()):
            first.setdefault(session, row)
        first.pop(NO_VOTE, None)
        of_row = torch.zeros(len(rewards), dtype=rewards.dtype)
        if first:
            asked = list(first.values())
            groups = repeated_batch["polar_group"][asked, None]
            own = self._real.compute_advantage(
                prompt_ids=groups, rewards=rewards[asked], mask=torch.ones(len(asked), 1)
            )
            for session, advantage in zip(first, own[:, 0], strict=True):
                of_row[repeated_batch["polar_session"] == session] = advantage
        return of_row[:, None].expand(mask.shape)


if __name__ == "__main__":
    main()
