# pyright: reportMissingImports=false
"""One step of NeMo RL's real GRPO on rollouts of real harnesses, through NeMo Gym's real servers.

    python -m tests.nemo_rl.rollouts FILE [CASE]...    # write the facts of each session to FILE

Real: NeMo RL's loader and config, its Ray actor `NemoGym` with NeMo Gym's servers, our agent server, the harnesses in
their sandboxes, `run_async_nemo_gym_rollout`, and all of `grpo_train`. There are two stand-ins. The policy that
generates is a script behind an HTTP server (`acting`), and the policy that is trained is a table of logits (`trainer`).
Then NeMo RL's own step, with the main trace of each session, gets the same answers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polar_gym.engines.embedded.chatml import TOKENIZER_FILE
from polar_gym.nemo.rows import row
from polar_gym.tasks.rows import Selection
from tests.nemo_rl import acting
from tests.nemo_rl.gym import gym_checkout, nemo_gym_actor
from tests.nemo_rl.rollout_cases import CASES, PI_AGENT, SHUTDOWN, Case, CaseTasks, agents
from tests.nemo_rl.trainer import VOCABULARY, Policy, Ready, Trained, one_step, run_step
from tests.support.tiny_model import tiny_tokenizer

SAMPLES = 2
RANKS = 4
RECIPE = "grpo_pi"
PATIENCE_SECONDS = 120
Facts = dict[str, Any]


class Recorded:
    """The `NemoGym` actor, whose results are kept; or, without an actor, the results that were kept."""

    def __init__(self, actor: Any = None, results: Sequence[Any] = ()) -> None:
        self._actor = actor
        self.results = list(results)

    @property
    def run_rollouts(self) -> Recorded:
        return self

    def options(self, **options: Any) -> Recorded:
        return self

    async def remote(self, *arguments: Any) -> AsyncIterator[Any]:
        if self._actor is None:
            for result in copy.deepcopy(self.results):
                yield Ready(result)
            return
        async for reference in self._actor.run_rollouts.options(num_returns="streaming").remote(*arguments):
            result = await reference
            self.results.append(copy.deepcopy(result))
            yield Ready(result)


class TrainedPolicy(Policy):
    """The table of logits over ids modulo its size, with an optimizer."""

    moved = 0.0

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        small = ids % VOCABULARY
        return self.logits.log_softmax(-1)[small[:, :-1], small[:, 1:]]

    def train(self, data: Any, loss_fn: Any, timer: Any = None, gbs: int | None = None) -> dict[str, Any]:
        done = super().train(data, loss_fn, timer, gbs)
        before = self.logits.detach().clone()
        torch.optim.AdamW([self.logits], lr=1e-3, weight_decay=0.0).step()
        self.moved = (self.logits.detach() - before).abs().max().item()
        return done


def configured(recipe: str, cases: Sequence[Case], directory: Path, url: str) -> Any:
    """Return NeMo RL's config of a recipe, with rows and agent servers for the cases. `url`: of the stand-in."""
    tasks = {task.instance_id: task for task in CaseTasks(Selection()).load()}
    data = directory / "rows.jsonl"
    lines = (json.dumps(row(tasks[case.instance_id], case.agent)) + "\n" for case in cases)
    data.write_text("".join(lines), encoding="utf-8")
    files = (f"data.train.data_path={data}", f"data.validation.data_path={data}")
    config = one_step(recipe, len(cases), SAMPLES, *files)
    gym = config.env["nemo_gym"]
    gym.pop("polar_swe_eval_agent")
    gym["config_paths"] = [path for path in gym["config_paths"] if "evaluation" not in path]
    server = gym[PI_AGENT]["responses_api_agents"]["polar_agent"]
    server |= {"entrypoint": "app.py", "domain": "coding", "policy_base_url": "${policy_base_url}"}
    server |= {"policy_model_name": "${policy_model_name}", "policy_api_key": "${policy_api_key}"}
    server["polar"] |= {
        "tasks": "tests.nemo_rl.rollout_cases:TASKS",
        "runtime": "bubblewrap",
        "evaluator": "swe",
        "budget": {"max_calls": 20},
        "pools": {"init": 2, "ready": 2, "postrun": 2},
        "engine": {**server["polar"]["engine"], "tokenizer": str(TOKENIZER_FILE), "patience_seconds": 2},
    }
    server["concurrency"] = 2
    gym |= agents(gym[PI_AGENT], {PI_AGENT, *(case.agent for case in cases)}, f"{url}{acting.OUTAGE}/v1")
    return config


def batches_of(config: Any, tokenizer: Any) -> Any:
    """Return NeMo RL's own loader of the rows."""
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.data.utils import setup_response_data
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows, _ = setup_response_data(tokenizer, copy.deepcopy(config.data), env_configs=None)
    return StatefulDataLoader(rows, batch_size=len(rows), shuffle=False, collate_fn=rl_collate_fn)


def roll_out(cases: Sequence[Case], gym: Path) -> list[Facts]:
    """Run the cases in one step with all traces, then NeMo RL's own step on the same answers. Return the facts of each
    session."""
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory(prefix="rollouts-") as name, acting.serving(tokenizer) as url:
        config = configured(f"{RECIPE}_all_traces", cases, Path(name), url)
        policy = TrainedPolicy(config.policy, RANKS)
        batches = batches_of(config, tokenizer)
        with nemo_gym_actor(config, f"{url}/v1", tokenizer, gym) as actor:
            environment = Recorded(actor)
            every = run_step(config, policy, batches, environment, tokenizer, patched=True)
            left = left_by_shutdown(actor)
        results = environment.results
        alone_config = configured(RECIPE, cases, Path(name), url)
        alone_policy = TrainedPolicy(alone_config.policy, 1)
        alone = run_step(alone_config, alone_policy, batches, Recorded(results=results), tokenizer, patched=False)
    step = {"moved": policy.moved, "moved_alone": alone_policy.moved, "left": left}
    sessions = [result for _, result in sorted((place, result) for place, result, _ in results)]
    return [{**facts, **step} for facts in facts_of(cases, sessions, every, alone)]


def left_by_shutdown(actor: Any) -> int:
    """Shut NeMo Gym down as NeMo RL does, in the middle of a session. Return how many processes of the session stay."""
    import ray

    (task,) = (task for task in CaseTasks(Selection()).load() if task.instance_id == SHUTDOWN.instance_id)
    running = actor.run_rollouts.options(num_returns="streaming").remote([{**row(task), "_rowidx": 0}], "timing")
    wait_until(lambda: sleeping() > 0, "the session runs its command")
    ray.get(actor.shutdown.remote())
    wait_until(lambda: not sleeping(), "the session's processes end", must=False)
    del running  # until here, Ray would cancel the rollout
    return sleeping()


def sleeping() -> int:
    """Return the number of processes that run `acting.SLEEP`."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += acting.SLEEP.encode() in file.read_bytes().replace(b"\0", b" ")
    return found


def wait_until(holds: Callable[[], bool], what: str, *, must: bool = True) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            assert not must, f"not in {PATIENCE_SECONDS} s: {what}"
            return
        time.sleep(0.2)


def facts_of(cases: Sequence[Case], sessions: Sequence[Any], every: Trained, alone: Trained) -> list[Facts]:
    """Return the facts of each session. `every`, `alone`: the steps with all traces, and of NeMo RL alone."""
    facts, first = [], 0
    for place, session in enumerate(sessions):
        answer = session["full_result"]
        traces = answer.get("training_traces", {}).get("traces", [])
        main = answer["response"]["metadata"].get("trace_id")
        rows = 1 + sum(trace["trace_id"] != main and any(trace["loss_mask"]) for trace in traces)
        plan = re.search(r"\[plan (\w+)\]", json.dumps(answer["response"]["output"]))
        facts.append(
            {
                "case": cases[place // SAMPLES].name,
                "plan": plan[1] if plan else "crash" if answer["failure_kind"] == "agent_run_error" else "dead",
                "reward": answer["reward"],
                "failure": answer["failure_kind"],
                "reason": answer["failure_reason"],
                "truncated": bool(answer["truncated"]) if "truncated" in answer else False,
                "calls": answer.get("model_calls", 0),
                "sampled": int(answer.get("sampled_tokens", 0)),
                "excluded": int(answer.get("excluded_tokens", 0)),
                "traces": len(traces),
                "prompt": session["message_log"][0]["token_ids"].tolist(),
                "exact": is_main_trace(session["message_log"], [each for each in traces if each["trace_id"] == main]),
                "alone": trained_of(alone, [place]),
                "every": trained_of(every, range(first, first + rows)),
            }
        )
        first += rows
    return facts


def trained_of(trained: Trained, rows: Sequence[int]) -> Facts:
    """Return the number of tokens that are trained in these rows, and the advantages of the rows."""
    tokens, advantages = 0, set()
    for place in rows:
        trained_places = torch.nonzero(trained.data["token_mask"][place]).flatten()
        advantages |= {round(value, 4) for value in trained.data["advantages"][place][trained_places].tolist()}
        tokens += len(trained_places) if trained.data["sample_mask"][place] else 0
    return {"rows": len(rows), "tokens": tokens, "advantages": sorted(advantages)}


def is_main_trace(messages: Sequence[Any], traces: Sequence[Any]) -> bool:
    """Return whether NeMo RL's messages are the trace, with its ids, mask and logprobs. A masked session has none."""
    if not traces:
        return messages[0]["token_ids"].tolist() == [0] == messages[1]["token_ids"].tolist()
    (trace,) = traces
    ids = [token for message in messages for token in message["token_ids"].tolist()]
    mask = [int(message["role"] == "assistant") for message in messages for _ in message["token_ids"]]
    logprobs = [value for message in messages for value in logprobs_of(message)]
    end = len(ids)  # behind the last sampled token, the trace may hold context
    same = ids == trace["token_ids"][:end] and mask == trace["loss_mask"][:end] and not any(trace["loss_mask"][end:])
    return same and logprobs == torch.tensor(trace["generation_logprobs"][:end]).tolist()


def logprobs_of(message: Any) -> list[float]:
    if message["role"] == "assistant":
        return message["generation_logprobs"].tolist()
    return [0.0] * len(message["token_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these")
    options = parser.parse_args()
    gym = gym_checkout(Path(os.environ["NEMO_RL"]))
    assert gym is not None, "the checkout has no NeMo Gym: git submodule update --init 3rdparty/Gym-workspace/Gym"
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    options.file.write_text(json.dumps(roll_out(cases, gym), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
