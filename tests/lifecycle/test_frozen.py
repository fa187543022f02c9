"""Kinds of calls that a second, frozen engine answers: they are named in the balance and never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from polar_gym.builders import build_trajectory
from polar_gym.chat import ChatRequest, Completion, OnDelta, has_media
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import FrozenConfig
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.schema import HarnessSpec, Message, PluginSpec, Sampling, StartFrom, ToolDefinition
from tests.support.calls import make_call
from tests.support.sessions import REQUEST, played, running_session

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


async def test_a_recorded_frozen_answer_is_given_again(tmp_path: Path) -> None:
    """Guards against a new answer of a frozen model in a resumed session: the harness goes on from another text."""

    async def harness(node: Node, capture: SessionCapture) -> None:
        said = [{"role": "user", "content": "Do it."}]
        answer = await ask(node.url, capture, said, BASH)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sum it up."}]
        await ask(node.url, capture, said)  # continues the policy's conversation

    def policy() -> EmbeddedEngine:
        return EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="The policy's own words.")]))

    first, _, directory = await played(tmp_path, CLAUDE, harness, policy(), frozen=FROZEN)
    again = CLAUDE.model_copy(update={"start_from": StartFrom(record=str(directory), owned=True)})
    calls, _, _ = await played(tmp_path, again, harness, policy(), frozen=FROZEN)
    assert [(call.call_id, call.outcome) for call in calls] == [(call.call_id, "delivered") for call in first]
    assert [call.frozen for call in calls] == [None, "helper"]
    assert all(call.replayed for call in calls)


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
        asked = make_call(0, [1], []), Sampling()
        assert await node.proxy.engine_answers(*asked)

        async def down(*_: Any) -> None:
            raise EngineError(503, "away")

        (helper,) = node._frozen
        helper.chat = down  # type: ignore[method-assign]
        assert not await node.proxy.engine_answers(*asked)


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


def in_words(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": "an image"} if has_media(message) else message for message in messages]


class Sees(EmbeddedEngine):
    """An engine whose template takes images, and which keeps the messages that it is asked about."""

    asked: ClassVar[list[Message]] = []

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return await super().template(in_words(messages), tools)

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        Sees.asked.extend(request.messages)
        return await super().chat(replace(request, messages=in_words(request.messages)), sampling, on_delta)


async def test_a_frozen_engine_that_reads_images_gets_them(tmp_path: Path) -> None:
    """Guards against a request in the terms of the policy, which reads text only."""
    frozen = FrozenConfig(engine=PluginSpec(**{**HELPER, "name": f"{__name__}:Sees"}), kinds=["judge"])
    policy = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="The policy's own words.")]))
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    asked = [{"role": "user", "content": [{"type": "text", "text": "Is it red?"}, {"type": "image", "source": source}]}]
    async with running_session(policy, tmp_path, CLAUDE, frozen=frozen) as (node, capture):
        for model in ("m", "judge"):
            await ask(node.url, capture, asked, model=model)
        of_policy, of_judge = (str(call.messages) for call in capture.calls)
    assert "image left out" in of_policy
    assert "base64" not in of_policy
    assert "base64,AA==" in of_judge
    assert "base64,AA==" in str(Sees.asked)
