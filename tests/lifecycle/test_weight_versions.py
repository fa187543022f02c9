"""An engine that does not say which weights sampled its answers: the record says what is known, as an estimate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.scripted import Script
from polar_gym.gateway.node.node import Node
from polar_gym.schema import HarnessSpec, RuntimeSpec, Sampling, TaskRequest

TASK = TaskRequest(task_id="t", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi"))


class SlowEngine(EmbeddedEngine):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__(EmbeddedOptions(scripts=[Script(commands=[], final_message="Done.")]))
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.begun.set()
        await self.go_on.wait()
        return await super().chat(request, sampling, on_delta)


async def test_a_call_is_marked_with_the_version_that_was_set_and_with_a_change(tmp_path: Path) -> None:
    engine = SlowEngine()
    node = Node(engine, cache=tmp_path / "cache")
    async with node, node.session(TASK) as life, aiohttp.ClientSession() as http:
        life.capture.running = True

        async def ask() -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
            headers = {"Authorization": f"Bearer {life.capture.key}"}
            async with http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()

        await ask()
        node.set_weight_version("1")
        await ask()
        engine.begun.clear()
        engine.go_on.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            await engine.begun.wait()
            node.set_weight_version("2")
            engine.go_on.set()
        calls = life.capture.calls
    unmarked, same, changed = [call.weight_versions for call in calls]
    assert unmarked == []
    assert [(span.version, span.until, span.estimated) for span in same] == [("1", None, True)]
    assert [(span.version, span.until, span.estimated) for span in changed] == [("1", "2", True)]
    assert (changed[0].start, changed[0].end) == (0, len(calls[2].response_ids))
