"""Episodes as NeMo Gym's verify responses: tokens, masks, envelope, metrics."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from polar_gym.engines import EngineError
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.node import Node
from polar_gym.nemo import AGENT, ENVIRONMENT, component_root, component_root_for, link_agent
from polar_gym.nemo.output import nemo_rl_experts
from polar_gym.nemo.rollouts import AgentSettings, Rollouts, _sampling, check_others, run_configs
from polar_gym.nemo.rows import row
from polar_gym.nemo.verified import verified_episode
from polar_gym.schema import (
    Episode,
    EvaluationResult,
    Failure,
    Sampling,
    Status,
    TaskRequest,
    ToolAttempt,
)
from polar_gym.tasks.bundled import BundledTasks
from tests.support.calls import make_call
from tests.support.choices import experts, recorded_episode
from tests.support.envelopes import check_envelope
from tests.support.nemo_rl import consumed
from tests.unit.nemo.answers import OFFLINE, ROW, answer_to, episode


def tool_turn(text: str, tool_call_id: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    tool_calls = [{"id": tool_call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "reasoning": "Hm.", "tool_calls": tool_calls}


def test_the_tokens_of_a_call_are_on_its_last_item() -> None:
    asked = [{"role": "user", "content": "Fix it."}]
    first = make_call(0, [1, 2], [3, 4], messages=asked, response=tool_turn("Looking.", "c1"))
    result = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
    answered = [*asked, tool_turn("Looking.", "c1"), result]
    last = make_call(1, [1, 2, 3, 4, 5], [6], messages=answered, response={"role": "assistant", "content": "Done."})

    output = verified_episode(ROW, episode([first, last]), [first, last])["response"]["output"]

    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call_output", "message")
    ]
    assert [item.get("generation_token_ids") for item in output] == [None, None, [3, 4], None, [6]]
    assert output[3] == {"type": "function_call_output", "call_id": "c1", "output": "a.py"}
    assert consumed(output) == [([1, 2], [3, 4]), ([5], [6])]


def test_a_sub_agent_and_a_compaction_lose_no_token() -> None:
    """The main trace is what a trainer of one sequence gets; the envelope has all of them."""
    calls = [
        make_call(0, [1, 2], [3, 4]),
        make_call(1, [7, 8], [9], hints={"kind": "subagent"}),
        make_call(2, [1, 2, 3, 4, 5], [6, 6]),
        make_call(3, [1, 50], [51], hints={"kind": "compaction"}),
    ]
    answer = verified_episode(ROW, episode(calls), calls)
    assert consumed(answer["response"]["output"]) == [([1, 2], [3, 4]), ([5], [6, 6])]
    check_envelope(answer["training_traces"], {call.call_id for call in calls})
    assert answer["sampled_tokens"] == answer["trainable_tokens"] == 6
    assert answer["consumed_fraction"] == pytest.approx(4 / 6)


def test_the_envelope_has_the_rewards_of_calls() -> None:
    calls = [make_call(0, [1, 2], [3, 4]), make_call(1, [7, 8], [9])]
    evaluation = EvaluationResult(evaluator="rubric", reward=1.0, call_rewards={"call0": 0.5})
    graded = episode(calls).model_copy(update={"evaluation": evaluation})
    assert verified_episode(ROW, graded, calls)["training_traces"]["model_call_rewards"] == {"call0": 0.5}
    assert "model_call_rewards" not in verified_episode(ROW, episode(calls), calls)["training_traces"]


def test_experts_are_in_the_form_of_nemo_rls_router_replay() -> None:
    """NeMo RL wants a row for each token of prompt and answer, and takes -1 for a token that was never run."""
    episode = recorded_episode()
    (trace,) = episode.trajectory.traces
    assert trace.routed_experts is not None
    head, kind, shape, data = nemo_rl_experts(trace.routed_experts, 6).split(":")
    rows = np.frombuffer(base64.b64decode(data), kind).reshape([int(size) for size in shape.split("x")])
    assert head == "nrlre1"
    assert rows.tolist() == [*experts([1, 2, 3, 4, 5]).tolist(), [[-1, -1]]]
    assert nemo_rl_experts(trace.routed_experts, 3).split(":")[2] == "3x1x2"


def test_a_fork_is_trained_once_and_context_carries_no_tokens() -> None:
    shared, short, long = make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4]), make_call(2, [1, 2, 5], [6, 7])
    calls = [shared, short, long]
    answer = verified_episode(ROW, episode(calls), calls)
    assert consumed(answer["response"]["output"]) == [([1], [2]), ([5], [6, 7])]
    check_envelope(answer["training_traces"], {"call0", "call1", "call2"})


def test_an_excluded_call_is_context() -> None:
    bent = make_call(0, [1], [2], sampling_mismatch=["tool_choice"])
    calls = [bent, make_call(1, [1, 2, 3], [4])]
    answer = verified_episode(ROW, episode(calls), calls)
    assert consumed(answer["response"]["output"]) == [([1, 2, 3], [4])]
    check_envelope(answer["training_traces"], {"call1"})
    assert answer["excluded_tokens"] == 1


def test_tool_call_attempts_are_metrics() -> None:
    calls = [make_call(0, [1], [2])]
    attempted = episode(calls)
    attempted.trajectory.tool_attempts = [
        ToolAttempt(call_id="call0", status=status) for status in ("ok", "malformed", "ok")
    ]
    answer = verified_episode(ROW, attempted, calls)
    assert (answer["tool_attempts"], answer["tool_attempts_ok"]) == (3, 2)


def test_only_a_verdict_is_a_metric() -> None:
    """Guards against a mean of 0 for evaluators without a verdict, also where each sample has the whole reward."""
    calls = [make_call(0, [1], [2])]
    graded = episode(calls)
    for verdict in (True, False, None):
        graded.evaluation = EvaluationResult(evaluator="rubric", reward=1.0, resolved=verdict)
        assert verified_episode(ROW, graded, calls).get("resolved") == verdict


def test_per_request_gives_the_first_call() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4, 5])]
    answer = verified_episode(ROW, episode(calls, builder="per_request"), calls)
    assert consumed(answer["response"]["output"]) == [([1], [2])]
    check_envelope(answer["training_traces"], {"call0", "call1"})


def test_of_answers_to_the_first_prompt_the_one_with_most_to_train_is_the_samples() -> None:
    """Guards against a first answer that was thrown away standing for the whole session."""
    calls = [
        make_call(0, [9], [8], hints={"kind": "auxiliary"}),
        make_call(1, [1, 2], [3, 3]),
        make_call(2, [1, 2], [4]),
        make_call(3, [1, 2, 4, 5], [6, 7, 7]),
        make_call(4, [1, 50], [51] * 9),
    ]
    answer = verified_episode(ROW, episode(calls), calls)
    assert consumed(answer["response"]["output"]) == [([1, 2], [4]), ([5], [6, 7, 7])]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("harness_error", "agent_run_error"),
        ("engine_error", "provider_unavailable"),
        ("evaluator_error", "verifier_error"),
        ("runtime_error", "polar:runtime_error"),
    ],
)
def test_a_failure_is_masked_in_both_places(kind: str, shown: str) -> None:
    calls = [make_call(0, [1], [2], response={"role": "assistant", "content": "Done."})]
    failure = Failure(stage=Status.RUNNING, kind=kind, message="it broke")
    answer = verified_episode({**ROW, "instance_config": {"x": 1}}, episode(calls, failure), calls)
    assert answer["mask_sample"] is True
    assert answer["instance_config"] == {"x": 1, "mask_sample": True}
    assert (answer["reward"], answer["failure_kind"]) == (0.0, shown)
    assert answer["failure_reason"] == "RUNNING: it broke"
    assert answer["consumed_fraction"] == 0.0
    assert answer["sampled_tokens"] == answer["trainable_tokens"] == 1, "the fidelity stays the session's"
    assert "training_traces" not in answer, "nothing that a trainer could train on by mistake"
    said, placeholder = answer["response"]["output"]
    assert said["content"][0]["text"] == "Done."
    assert "generation_token_ids" not in said, "with its own tokens it would vote in its group's baseline"
    assert consumed([placeholder]) == [([0], [0])]


def test_a_good_episode_is_not_masked_and_the_collectors_keys_are_left_out() -> None:
    calls = [make_call(0, [1], [2])]
    answer = verified_episode(ROW, episode(calls), calls)
    assert (answer["mask_sample"], answer["instance_config"]) == (False, {"mask_sample": False})
    assert answer["failure_kind"] is None
    assert answer["responses_create_params"] == ROW["responses_create_params"]
    assert not [key for key in answer if key.startswith("_")], "each number would become a metric"
    assert orjson.loads(orjson.dumps(answer)) == answer, "plain JSON, no numpy, no nan"


def test_a_session_with_nothing_to_train_on_is_masked_with_the_reason() -> None:
    calls = [make_call(0, [1], [2], outcome="abandoned")]
    answer = verified_episode(ROW, episode(calls), calls)
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "polar:nothing_to_train")
    assert "1 abandoned" in answer["failure_reason"]
    assert consumed(answer["response"]["output"]) == [([0], [0])]


def test_a_logprob_that_is_no_number_is_refused() -> None:
    """NeMo RL would end the whole batch with a RuntimeError."""
    call = make_call(0, [1], [2])
    call.logprobs[0] = float("nan")
    with pytest.raises(ValueError, match="call call0: the engine gave a logprob that is not a finite number"):
        verified_episode(ROW, episode([call]), [call])


def test_a_failure_is_told_also_where_its_traces_could_not_be_trained() -> None:
    """A broken logprob beside it took the failure's place."""
    call = make_call(0, [1], [2])
    call.logprobs[0] = float("nan")
    died = Failure(stage=Status.RUNNING, kind="harness_error", message="it broke")
    assert verified_episode(ROW, episode([call], died), [call])["failure_kind"] == "agent_run_error"


def test_a_mask_of_parts_of_calls_is_refused() -> None:
    calls = [make_call(0, [1], [2, 3])]
    whole = episode(calls)
    whole.trajectory.traces[0].loss_mask[0] = 0
    with pytest.raises(ValueError, match="must train on whole calls"):
        verified_episode(ROW, whole, calls)


# The server's settings ------------------------------------------------------------------------------------------------


def test_each_replica_gets_a_config_and_its_share_of_the_places() -> None:
    urls = ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1", "http://127.0.0.1:8002/v1"]
    configs = run_configs(
        AgentSettings(policy_base_url=urls, policy_model_name="qwen", policy_api_key="k", concurrency=64)
    )
    assert [config.engine.options["url"] for config in configs] == urls
    assert {(config.engine.options["model"], config.engine.options["api_key"]) for config in configs} == {("qwen", "k")}
    assert {config.pools.run for config in configs} == {22}
    assert sum(config.pools.init for config in configs) == 3, "2 places, rounded up: not 2 for each replica"
    assert {config.pools.prewarm for config in configs} == {1}


def test_engine_options_pass_through_to_the_policys_engine() -> None:
    settings = AgentSettings(policy_base_url="http://127.0.0.1:8000", polar={"engine": {"max_model_len": 4096}})
    (config,) = run_configs(settings)
    assert config.engine.name == "vllm"
    assert config.engine.options["url"] == "http://127.0.0.1:8000"
    assert config.engine.options["max_model_len"] == 4096


def test_without_a_policy_url_the_server_does_not_start() -> None:
    with pytest.raises(ConfigError, match="policy_base_url: is required"):
        Rollouts(AgentSettings())


def test_a_wrong_key_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: harness"):
        Rollouts(AgentSettings(polar={"engine": "embedded", "harnes": "pi"}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("engine", None, r"polar\.engine=None: expected a mapping or a name"),
        ("pools", None, r"polar\.pools=None: expected a mapping"),
        ("pools", "large", r"polar\.pools='large': expected a mapping"),
        ("pools", {"run": 64}, r"polar\.pools\.run=64: set concurrency=64 instead"),
        ("harness", None, "harness=None: expected a mapping or a name"),
        ("rollout", {"num_samples": 8}, r"polar\.rollout\.num_samples=8: has no effect here: each row is one session"),
        ("rollout", {"metrics": "wandb"}, r"polar\.rollout\.metrics='wandb': has no effect here: the trainer logs"),
    ],
)
def test_a_section_that_is_empty_or_has_no_effect_is_named(key: str, value: Any, says: str) -> None:
    """In YAML, a key with nothing after it. And guards against one session where eight were asked for."""
    with pytest.raises(ConfigError, match=says):
        run_configs(AgentSettings(policy_base_url="http://127.0.0.1:1", polar={key: value}))


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_is_a_task_where_its_server_grades_a_part(nested: bool) -> None:
    """Guards against a `composite` around `nemo_gym` that masked every row as an unknown task."""
    server = {"name": "nemo_gym", "url": "http://127.0.0.1:1"}
    done = {"name": "session_completion"}
    evaluator = {"name": "composite", "components": {"env": server, "done": done}} if nested else server
    rollouts = Rollouts(
        AgentSettings(policy_base_url="http://127.0.0.1:1", polar={"harness": "codex", "evaluator": evaluator})
    )
    row = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}], "tools": []}}
    machinery = SimpleNamespace(tasks={}, day=None)
    request = rollouts._request(machinery, row)  # pyright: ignore[reportArgumentType]
    assert request.instruction == "2+2?"
    graded = request.evaluator.options["components"]["env"] if nested else request.evaluator.options
    assert graded["row"]["responses_create_params"] == row["responses_create_params"]


def test_keys_of_nemo_gym_pass_and_ours_in_the_wrong_place_do_not() -> None:
    check_others(["entrypoint", "domain", "description", "value", "datasets", "verified", "license"])
    with pytest.raises(ConfigError, match=r"runtime: belongs to polar-gym's config: write polar\.runtime"):
        check_others(["domain", "runtime"])
    with pytest.raises(ConfigError, match="concurency: unknown key; concurrency is meant"):
        check_others(["concurency"])


# Rows that cannot be run: masked, never an error ----------------------------------------------------------------------


async def test_an_unknown_task_is_masked_and_carries_one_token() -> None:
    task = BundledTasks(BundledTasks.Options()).load()[0]
    unknown = {**row(task), "verifier_metadata": {"instance_id": "nope"}}
    (answer,) = await answer_to(AgentSettings(polar=OFFLINE), unknown)
    assert (answer["reward"], answer["mask_sample"], answer["failure_kind"]) == (0.0, True, "polar:unknown_task")
    assert "'nope'" in answer["failure_reason"]
    assert task.instance_id in answer["failure_reason"]
    assert consumed(answer["response"]["output"]) == [([0], [0])]


def test_a_row_goes_to_the_node_with_the_fewest_rows() -> None:
    """Guards against rows that wait for a node whose one place hangs, beside nodes without any row."""
    rollouts = Rollouts(AgentSettings(policy_base_url="http://127.0.0.1:1/v1", polar={"runtime": "bubblewrap"}))
    with rollouts._place(3) as hung:
        others = set[int]()
        for _ in range(6):
            with rollouts._place(3) as place:
                others.add(place)
        assert others == {0, 1, 2} - {hung}
        with rollouts._place(3) as one, rollouts._place(3) as other:
            assert {hung, one, other} == {0, 1, 2}


def test_a_field_of_a_row_without_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"responses_create_params": {"max_output_tokens": 7, "temperature": 0.5}}
    for _ in range(2):
        assert _sampling(Sampling(), asked).temperature == 0.5
    (message,) = [record.message for record in caplog.records if "max_output_tokens" in record.message]
    assert "has no effect" in message


async def test_a_dead_engine_is_masked_and_does_not_end_the_batch(unused_tcp_port: int) -> None:
    """NeMo RL raises `ValueError` for a sample without any token."""
    settings = AgentSettings(policy_base_url=f"http://127.0.0.1:{unused_tcp_port}/v1", polar={"runtime": "bubblewrap"})
    (answer,) = await answer_to(settings, ROW)
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "provider_unavailable")
    assert "cannot be reached" in answer["failure_reason"]
    assert consumed(answer["response"]["output"]) == [([0], [0])]
    assert "training_traces" not in answer


async def test_sampling_of_a_row_that_is_impossible_is_masked() -> None:
    task = BundledTasks(BundledTasks.Options()).load()[0]
    hot = row(task)
    hot["responses_create_params"]["temperature"] = -1
    (answer,) = await answer_to(AgentSettings(polar=OFFLINE), hot)
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "polar:invalid_row")
    assert "temperature=-1" in answer["failure_reason"]


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        (
            {"verifier_metadata": "polar__intervals-1"},
            "invalid_row",
            "verifier_metadata='polar__intervals-1': expected",
        ),
        ({"instance_config": [1]}, "invalid_row", r"instance_config=[1]: expected a mapping"),
        ({"verifier_metadata": {"instance_id": ["a"]}}, "unknown_task", "verifier_metadata.instance_id=['a']: not in"),
        ({"_ng_rollout_index": "first"}, "internal_error", "first"),
    ],
)
async def test_a_row_of_a_strange_shape_is_masked(fields: dict[str, Any], kind: str, says: str) -> None:
    good = row(BundledTasks(BundledTasks.Options()).load()[0])
    (answer,) = await answer_to(AgentSettings(polar=OFFLINE), {**good, **fields})
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, f"polar:{kind}")
    assert answer["instance_config"] == {"mask_sample": True}
    assert says in answer["failure_reason"]
    assert len(consumed(answer["response"]["output"])) == 1


async def test_the_samples_of_a_group_have_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a group whose samples are all the same session where `polar.sampling.seed` is set: only NeMo Gym's
    collector sets `_ng_rollout_index`, and another caller may send no number at all."""
    numbers: list[int] = []

    async def rollout(node: Node, request: TaskRequest, sample_index: int, on_change: Any) -> Episode:
        numbers.append(sample_index)
        raise EngineError(503, "gone")

    monkeypatch.setattr(Node, "rollout", rollout)
    good = row(BundledTasks(BundledTasks.Options()).load()[0])
    of_nemo_rl = [{**good, "_rowidx": number} for number in range(4, 6)]
    of_collector = {**good, "_ng_rollout_index": 0, "_rowidx": 9}
    await answer_to(AgentSettings(polar=OFFLINE), *of_nemo_rl, of_collector, good, good)
    assert numbers == [4, 5, 0, 0, 1]


# The component root ---------------------------------------------------------------------------------------------------


def test_the_example_rows_are_the_bundled_tasks() -> None:
    lines = (component_root() / "environments/polar_swe/data/example.jsonl").read_bytes().splitlines()
    tasks = BundledTasks(BundledTasks.Options()).load()
    assert [orjson.loads(line) for line in lines] == [row(task) for task in tasks]


def test_the_example_rollouts_obey_the_law() -> None:
    lines = (component_root() / "environments/polar_swe/data/example_rollouts.jsonl").read_bytes().splitlines()
    for answer in map(orjson.loads, lines):
        assert (answer["reward"], answer["mask_sample"]) == (1.0, False)
        walked = consumed(answer["response"]["output"])
        assert sum(len(sampled) for _, sampled in walked) == answer["sampled_tokens"]
        (trace,) = answer["training_traces"]["traces"]
        session_id = answer["response"]["metadata"]["session_id"]
        check_envelope(answer["training_traces"], set(trace["model_call_ids"]), session_id)
    assert len(lines) == 5


def test_link_agent_is_idempotent_and_overwrites_nothing(tmp_path: Path) -> None:
    link = link_agent(tmp_path)
    assert link_agent(tmp_path) == link
    assert (link / "app.py").read_bytes() == (component_root() / AGENT / "app.py").read_bytes()
    link.unlink()
    link.mkdir()
    with pytest.raises(FileExistsError):
        link_agent(tmp_path)


def test_the_component_root_suits_the_version_of_nemo_gym(tmp_path: Path) -> None:
    """Up to 0.6 an environment server is an error, from 0.7 on its absence is deprecated."""
    for gym in (None, "0.4.0", "0.6.12"):
        assert component_root_for(gym, tmp_path) == component_root()
    for gym in ("0.7.0", "0.10.1", "1.0.0rc1"):
        root = component_root_for(gym, tmp_path)
        assert component_root_for(gym, tmp_path) == root, "made once"
        config = yaml.safe_load((root / ENVIRONMENT / "config.yaml").read_text())
        (declared,) = config["polar_swe_environment_server"]["environment_servers"].values()
        assert declared["agent_server"]["name"] in config
        for path in (ENVIRONMENT / "manifest.yaml", ENVIRONMENT / "data" / "example.jsonl", AGENT / "app.py"):
            assert (root / path).read_bytes() == (component_root() / path).read_bytes()
    with pytest.raises(ValueError, match=r"'next' is not a version of NeMo Gym; expected e\.g\. 0\.7\.0"):
        component_root_for("next", tmp_path)
