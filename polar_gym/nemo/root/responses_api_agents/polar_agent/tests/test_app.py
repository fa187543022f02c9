# pyright: reportMissingImports=false, reportCallIssue=false
"""The agent server's contract, with the embedded engine: no GPU, no network."""

import asyncio
from typing import Any

import pytest
from nemo_gym.server_utils import ServerClient
from responses_api_agents.polar_agent.app import PolarAgent, PolarAgentConfig, PolarRunRequest

OFFLINE = {"engine": "embedded", "runtime": "bubblewrap"}


def agent(**settings: Any) -> PolarAgent:
    config = PolarAgentConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="polar_agent", **settings)
    return PolarAgent(config=config, server_client=ServerClient.model_construct())


def request(**fields: Any) -> PolarRunRequest:
    return PolarRunRequest.model_validate({"responses_create_params": {"input": "Fix it."}, **fields})


def test_the_server_serves_run() -> None:
    app = agent(polar=OFFLINE).setup_webserver()
    assert "/run" in {getattr(route, "path", None) for route in app.routes}


def test_a_row_without_a_task_is_masked_not_raised() -> None:
    answer = asyncio.run(agent(polar=OFFLINE).run(request(verifier_metadata={"instance_id": "nope"}, other="kept")))
    told = answer.model_dump(mode="json")
    assert (told["reward"], told["mask_sample"], told["failure_kind"]) == (0.0, True, "polar:unknown_task")
    assert told["instance_config"] == {"mask_sample": True}
    assert told["other"] == "kept"


def test_without_a_policy_model_the_server_does_not_start() -> None:
    with pytest.raises(ValueError, match="policy_base_url: is required"):
        agent()


def test_a_key_that_would_be_ignored_is_named() -> None:
    with pytest.raises(ValueError, match=r"harness: .* write polar\.harness"):
        agent(polar=OFFLINE, harness="codex")


def test_the_agents_own_loop_is_not_gyms() -> None:
    with pytest.raises(NotImplementedError):
        asyncio.run(agent(polar=OFFLINE).responses({"input": "Fix it."}))
