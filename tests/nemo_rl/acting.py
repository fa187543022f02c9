# pyright: reportMissingImports=false
"""A scripted policy behind a stand-in for NeMo RL's HTTP server: its two routes, and its own splicing of prompts.

The policy draws a plan for each session when the session's first call comes, and writes the plan into its answer.
Later calls have the answer in their history, or in the summary that a compaction made of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message, canonical_json
from polar_gym.conformance.acting import ORDER, CompactingPolicy, DelegatingPolicy
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.embedded.chatml import text_content
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.engines.embedded.shell_tools import ShellTool, find_shell, shell_arguments
from polar_gym.schema import Message, Sampling
from polar_gym.tasks.request import reference_script
from polar_gym.tasks.rows import Selection
from tests.nemo_rl.rollout_cases import CASES, SHUTDOWN, CaseTasks, Plan
from tests.support.vllm_stand_in import streamed

CONTEXT_LENGTH = 40_960
MODEL = "policy"
OUTAGE = "/outage"
"""The path of the engine that has an outage: from its first call without an answer on, it answers none."""
SLEEP = f"sleep 1000.{os.getpid()}"
"""Different in each run, so that its processes can be found."""
COMMANDS: dict[str, list[str]] = {
    "idle": ["ls"],
    "loop": ["ls"] * 1000,
    "sleep": ["ls", SLEEP],
    "kill": ["ls", "kill -9 $PPID; sleep 1000"],
    "outage": ["ls"],
}
"""Plan -> its shell commands, where they are not the reference solution."""


class EngineDeadError(Exception):
    """The policy has no answer: the server closes the connection."""


class ActingPolicy(ScriptedPolicy):
    """Follows the plans of `CASES`."""

    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._others = {"compact": CompactingPolicy(options), "delegate": DelegatingPolicy(options)}
        self._begun: dict[str, int] = defaultdict(int)

    def next_message(self, request: ChatRequest) -> Message:
        text = "\n".join(text_content(message, index) for index, message in enumerate(request.messages))
        shell = find_shell(request.tools)
        ordered = ORDER in text
        plan = re.search(r"\[plan (\w+)\]", text)
        if plan is None and not ordered and shell is not None:
            return self._first(text, request, shell)
        name = plan[1] if plan else "delegate" if ordered else "solve"
        if name == "outage":
            raise EngineDeadError
        message = self._of(name, request, shell)
        keep = name == "compact" and not message.get("tool_calls")
        return {**message, "content": f"[plan compact] {message.get('content')}"} if keep else message

    def _first(self, text: str, request: ChatRequest, shell: ShellTool) -> Message:
        case = next(case for case in (*CASES, SHUTDOWN) if case.title in text)
        plan: Plan = case.plans[min(self._begun[case.name], len(case.plans) - 1)]
        self._begun[case.name] += 1
        if plan == "dead":
            raise EngineDeadError
        return {**self._of(plan, request, shell), "content": f"[plan {plan}]"}

    def _of(self, plan: str, request: ChatRequest, shell: ShellTool | None) -> Message:
        if plan not in COMMANDS:
            other = self._others.get(plan)
            return other.next_message(request) if other else super().next_message(request)
        done = sum(bool(message.get("tool_calls")) for message in request.messages)
        if shell is None or done >= len(COMMANDS[plan]):
            return assistant_message("I leave it at that.", None, [])
        arguments = canonical_json(shell_arguments(shell, COMMANDS[plan][done]))
        return assistant_message(
            None, None, [{"type": "function", "function": {"name": shell.name, "arguments": arguments}}]
        )


class Acting(EmbeddedEngine):
    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._policy = ActingPolicy(options)


class Server:
    """NeMo RL's two routes. The prompts of continued conversations are made by NeMo RL's own function."""

    def __init__(self, tokenizer: Any) -> None:
        tasks = CaseTasks(Selection()).load()
        scripts = [Script(**reference_script(task)) for task in tasks]
        self._tokenizer = tokenizer
        self._outage = False
        self._engine = Acting(EmbeddedOptions(scripts=scripts, max_model_len=CONTEXT_LENGTH))

    async def start(self) -> str:
        await self._engine.start()
        application = web.Application(client_max_size=64 * 1024**2)
        for prefix in ("", OUTAGE):
            application.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            application.router.add_post(f"{prefix}/tokenize", self._tokenize)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._engine.close()

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            ids = await self._engine.template(body["messages"], body.get("tools") or [])
        except EngineError as error:  # the gateway asks whether images are taken
            return web.Response(status=500, text=error.message)
        return web.json_response({"count": len(ids), "max_model_len": CONTEXT_LENGTH, "tokens": ids.tolist()})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        if http.path.startswith(OUTAGE) and self._outage:
            return hung_up(http)
        body = await http.json(loads=orjson.loads)
        request = ChatRequest(
            model=MODEL,
            messages=body["messages"],
            tools=body.get("tools") or [],
            tool_choice=body.get("tool_choice"),
            max_tokens=body.get("max_tokens"),
            stop=body.get("stop") or [],
            prompt_ids=await self._prompt(body),
        )
        try:
            done = await self._engine.chat(request, Sampling())
        except EngineDeadError:
            self._outage = self._outage or http.path.startswith(OUTAGE)
            return hung_up(http)
        calls = [{"id": f"call-{place}", **call} for place, call in enumerate(done.message.get("tool_calls") or [])]
        ids = done.response_ids.tolist()
        choice = {
            "message": {**done.message, "tool_calls": calls},
            "finish_reason": done.finish_reason,
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": logprob(place, token)} for place, token in enumerate(ids)]},
        }
        return streamed(web.json_response({"choices": [choice], "prompt_token_ids": done.prompt_ids.tolist()}))

    async def _prompt(self, body: dict[str, Any]) -> Any:
        from nemo_rl.models.generation.openai_server_utils import replace_prefix_tokens

        messages, tools = body["messages"], body.get("tools") or []
        ids = (await self._engine.template(messages, tools)).tolist()
        required = body.get("required_prefix_token_ids")
        if required is None:
            return np.asarray(ids, np.int32)
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        before = (await self._engine.template(messages[: last + 1], tools)).tolist()
        return np.asarray(replace_prefix_tokens(self._tokenizer, required, before, ids), np.int32)


def hung_up(http: web.Request) -> web.Response:
    """Close a connection without an answer."""
    assert http.transport is not None
    http.transport.abort()
    return web.Response()


def logprob(place: int, token: int) -> float:
    """Return a logprob that differs from token to token: the script itself is certain of all tokens."""
    return -((token * 31 + place) % 97 + 1) / 100


@contextmanager
def serving(tokenizer: Any) -> Iterator[str]:
    """Run the stand-in in a thread, and give its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Server(tokenizer)
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
