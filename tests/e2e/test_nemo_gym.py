"""The agent server under the real NeMo Gym, with its own commands, a real harness and the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from polar_gym.nemo import AGENT, ENVIRONMENT, component_root
from tests.e2e.nemo_gym import INSTALL, PYTHONS, NemoGym, installed, nemo_gym, serving, venv_directory
from tests.support.envelopes import check_envelope
from tests.support.nemo_rl import consumed
from tests.support.requirements import need, need_bubblewrap, need_node

pytestmark = pytest.mark.timeout(2400)

OFFLINE = {"engine": "embedded", "runtime": "bubblewrap"}
BROKEN = {
    name: {"responses_api_agents": {"polar_agent": {"entrypoint": "app.py", "domain": "coding", **settings}}}
    for name, settings in {
        "broken_agent": {"polar": {**OFFLINE, "harness": {"name": "tests.e2e.broken_harness:CRASHING"}}},
        "orphaned_agent": {"policy_base_url": "http://127.0.0.1:9/v1", "polar": {"runtime": "bubblewrap"}},
    }.items()
}
"""An agent whose harness crashes, and one whose engine is dead."""
EXAMPLE = component_root() / ENVIRONMENT / "data" / "example.jsonl"


@pytest.fixture(scope="module", params=list(PYTHONS))
def gym(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NemoGym]:
    """Servers that run: `polar_swe_agent` as it is shipped, and the broken ones."""
    need(installed(request.param), f"NeMo Gym {request.param}", INSTALL)
    need_node()
    need_bubblewrap()
    prefix = "++polar_swe_agent.responses_api_agents.polar_agent.polar"
    with nemo_gym(request.param, tmp_path_factory.mktemp("nemo") / "work") as gym:
        broken = gym.directory / "broken.yaml"
        broken.write_text(yaml.safe_dump(BROKEN), encoding="utf-8")
        offline = [f"{prefix}.{key}={value}" for key, value in OFFLINE.items()]
        with serving(gym, "--environment", "polar_swe", "--config", str(broken), *offline):
            yield gym


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]


def test_the_example_rows_are_solved_and_an_unknown_task_is_masked(gym: NemoGym) -> None:
    unknown = {**rows()[0], "verifier_metadata": {"instance_id": "nope"}}
    results = gym.evaluate([*rows(), unknown], "polar_swe_agent", repeats=2)
    assert len(results) == 12
    for result in results:
        messages = consumed(result["response"]["output"])
        if result["verifier_metadata"]["instance_id"] == "nope":
            assert (result["reward"], result["mask_sample"]) == (0.0, True)
            assert (result["failure_kind"], len(messages)) == ("polar:unknown_task", 1)
            continue
        assert (result["reward"], result["mask_sample"]) == (1.0, False), result["failure_reason"]
        assert result["instance_config"] == {"mask_sample": False}
        assert len(messages) == result["model_calls"] >= 3
        assert sum(len(sampled) for _, sampled in messages) == result["sampled_tokens"] == result["trainable_tokens"]
        assert result["consumed_fraction"] == 1.0
        (trace,) = result["training_traces"]["traces"]
        assert trace["token_ids"] == [token for message in messages for part in message for token in part]
        session = result["response"]["metadata"]["session_id"]
        check_envelope(result["training_traces"], set(trace["model_call_ids"]), session)


def test_a_harness_that_crashes_does_not_end_the_run(gym: NemoGym) -> None:
    results = gym.evaluate(rows()[:2], "broken_agent")
    assert len(results) == 2
    for result in results:
        assert (result["reward"], result["mask_sample"], result["failure_kind"]) == (0.0, True, "agent_run_error")
        assert result["instance_config"] == {"mask_sample": True}
        assert "cannot find my left shoe" in result["failure_reason"]
        assert consumed(result["response"]["output"]) == [([0], [0])], "one token, so that NeMo RL takes the sample"


def test_a_dead_engine_does_not_end_the_run(gym: NemoGym) -> None:
    (result,) = gym.evaluate(rows()[:1], "orphaned_agent")
    assert (result["reward"], result["mask_sample"], result["failure_kind"]) == (0.0, True, "provider_unavailable")
    assert "127.0.0.1:9" in result["failure_reason"]
    assert consumed(result["response"]["output"]) == [([0], [0])]


def test_the_components_own_tests_pass(gym: NemoGym) -> None:
    python = venv_directory(gym.version) / "bin" / "python"
    done = subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"),
            component_root() / AGENT / "tests",
        ],
        env=gym.environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=component_root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_nemo_gym_finds_the_environment_valid(gym: NemoGym) -> None:
    said = gym.run("env", "validate", "--environment", "polar_swe")
    assert "Config is valid" in said
    assert "deprecated" not in said.lower(), "from 0.7 on, the environment server is declared"
    if gym.version == "0.4.0":
        return  # it knows no manifests
    said = gym.run("env", "validate", "--manifest", str(gym.root / ENVIRONMENT / "manifest.yaml"))
    assert "example: 5 rows" in said
    assert "does not match inferred profile" not in said
