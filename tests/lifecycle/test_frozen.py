"""Kinds of calls that a second, frozen engine answers: they are named in the balance and never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import FrozenConfig
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.schema import HarnessSpec, PluginSpec
from tests.support.sessions import REQUEST, running_session

CLAUDE = REQUEST.model_copy(update={"agent": HarnessSpec(name="claude_code")})
HELPER: dict[str, Any] = {"name": "embedded", "model": "helper", "scripts": [{"final_message": "A short title."}]}
FROZEN = FrozenConfig(engine=PluginSpec(**HELPER))
BASH = {"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}


async def ask(
    url: str, capture: SessionCapture, messages: list[dict[str, Any]], *tools: dict[str, Any], model: str = "m"
) -> str:
    """Ask as Claude Code does: a request without tools is one for a title or the like."""
    body = {"model": model, "max_tokens": 100, "messages": messages, "tools": list(tools)}
    headers = {"x-api-key": capture.key, "anthropic-version": "2023-06-01"}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/messages", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["content"][0]["text"]


async def test_a_frozen_engine_answers_its_kinds_and_trains_nothing(tmp_path: Path) -> None:
    policy = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="The policy's own words.")]))
    said = [{"role": "user", "content": "Do it."}]
    async with running_session(policy, tmp_path, CLAUDE, frozen=FROZEN) as (node, capture):
        for tools in ([BASH], [], [BASH], []):
            answer = await ask(node.url, capture, said, *tools)
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        calls = capture.calls
    assert [call.frozen for call in calls] == [None, "helper", None, "helper"]
    assert [str((call.response or {})["content"]) for call in calls[:2]] == [
        "The policy's own words.",
        "A short title.",
    ]
    assert [call.continuation for call in calls] == ["root", "root", "spliced", "root"]
    assert calls[2].parent_id == calls[0].call_id, "the ids of the other model continue nothing"
    fidelity = build_trajectory(calls, CLAUDE.builder).fidelity
    assert fidelity.excluded == {"frozen": sum(len(call.response_ids) for call in calls if call.frozen)}
    assert fidelity.trainable_tokens == sum(len(call.response_ids) for call in calls if not call.frozen) > 0


async def test_a_title_does_not_break_the_conversation_of_the_policy(tmp_path: Path) -> None:
    policy = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="The policy's own words.")]))
    said = [{"role": "user", "content": "Do it."}]
    async with running_session(policy, tmp_path, CLAUDE, frozen=FROZEN) as (node, capture):
        answer = await ask(node.url, capture, said, BASH)
        await ask(node.url, capture, [{"role": "user", "content": "A title, please."}])
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        await ask(node.url, capture, said, BASH)
        assert [call.continuation for call in capture.calls] == ["root", "root", "spliced"]


@pytest.mark.parametrize("frozen", [None, FrozenConfig(engine=PluginSpec(**HELPER), kinds=["judge"])])
async def test_a_judge_in_the_sandbox_is_a_kind_of_its_own(tmp_path: Path, frozen: FrozenConfig | None) -> None:
    """Guards against training the policy on the verdicts that a program in the sandbox asks for."""
    policy = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="The policy's own words.")]))
    asked = [{"role": "user", "content": "Is this right?"}]
    async with running_session(policy, tmp_path, CLAUDE, frozen=frozen) as (node, capture):
        answers = [await ask(node.url, capture, asked, BASH, model=model) for model in ("m", "judge")]
        calls = capture.calls
    assert answers[1] == ("A short title." if frozen else "The policy's own words.")
    trajectory = build_trajectory(calls, CLAUDE.builder)
    reason = "frozen" if frozen else "kind:judge"
    assert trajectory.fidelity.excluded == {reason: len(calls[1].response_ids)}
    assert [trace.kind for trace in trajectory.traces] == ["main"]


async def test_a_frozen_engine_that_is_down_is_the_machinerys_fault(tmp_path: Path) -> None:
    """Guards against a reward of 0 for a session whose titles could not be sampled."""
    async with running_session(EmbeddedEngine(EmbeddedOptions()), tmp_path, CLAUDE, frozen=FROZEN) as (node, _):
        assert await node.proxy.engine_answers()

        async def down(*_: Any) -> None:
            raise EngineError(503, "away")

        (helper,) = node._frozen
        helper.chat = down  # type: ignore[method-assign]
        assert not await node.proxy.engine_answers()


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ("{engine:{name:embedded},kinds:[main]}", r"proxy\.frozen\.kinds\.0='main'"),
        ("{engine:{name:vllm,wings:2}}", r"proxy\.frozen\.engine\.wings=2: unknown key"),
    ],
)
def test_wrong_settings_are_named(frozen: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [f"proxy.frozen={frozen}"])
