"""Whatever a client sends, the gateway answers it or refuses it: no 5xx, no traceback, no call on record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.schema import HarnessSpec, RuntimeSpec, TaskRequest
from tests.support.anything import any_json, paths, replaced

PARAMETERS: Any = {"type": "object", "properties": {"command": {"type": "string"}}}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen_code", "/v1/chat/completions"): {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "go"}]}],
        "tools": [{"type": "function", "function": {"name": "run", "parameters": PARAMETERS}}],
        "stream": False,
    },
    ("opencode", "/v1/chat/completions"): {"model": "m", "messages": [{"role": "system", "content": "s"}]},
    ("codex", "/v1/responses"): {
        "model": "m",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "s"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "carrier_a_0.YQ=="},
            {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "run", "parameters": PARAMETERS}, {"type": "local_shell"}],
        "client_metadata": {"a": "b"},
    },
    ("codex", "/v1/responses/input_tokens"): {"model": "m", "input": [{"role": "user", "content": "go"}]},
    ("claude_code", "/v1/messages"): {
        "model": "m",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "run", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "r"}]},
        ],
        "tools": [{"name": "run", "input_schema": PARAMETERS}],
    },
    ("claude_code", "/v1/messages/count_tokens"): {"model": "m", "messages": [{"role": "user", "content": "go"}]},
    ("gemini_cli", "/v1beta/models/m:generateContent"): {
        "contents": [
            {"role": "user", "parts": [{"text": "go"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "run", "args": {"x": 1}}, "thoughtSignature": "YQ"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "run", "response": {"output": "r"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "run", "parametersJsonSchema": PARAMETERS}]}],
        "generationConfig": {"maxOutputTokens": 9, "stopSequences": ["a"]},
    },
    ("gemini_cli", "/v1beta/models/m:countTokens"): {"contents": [{"parts": [{"text": "go"}]}]},
}


class Gateway:
    """A running session of every harness, in a loop that examples can be sent from."""

    def __init__(self, state: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.captures: dict[str, SessionCapture] = {}
        self._loop.run_until_complete(self._open(state))

    async def _open(self, state: Path) -> None:
        script = Script(final_message="Done.")
        engine = EmbeddedEngine(EmbeddedOptions(scripts=[script], max_model_len=131_072))  # the longest value fits
        node = await self._stack.enter_async_context(Node(engine, cache=state / "c", state=state / "s"))
        for harness in {harness for harness, _ in BODIES}:
            task = TaskRequest(
                task_id=harness,
                instruction="x",
                runtime=RuntimeSpec(name="bubblewrap"),
                agent=HarnessSpec(name=harness),
            )
            capture = (await self._stack.enter_async_context(node.session(task))).capture
            capture.running = True
            self.captures[harness] = capture
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(node.url))

    def post(self, harness: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        return self._loop.run_until_complete(self._post(self.captures[harness].key, path, body, headers or {}))

    async def _post(self, key: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        keys = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01", "x-goog-api-key": key}
        async with self._http.post(path, data=body, headers=keys | headers) as response:
            return response.status, await response.read()

    def close(self) -> None:
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    opened = Gateway(tmp_path_factory.mktemp("gateway"))
    yield opened
    opened.close()


_json = any_json.map(orjson.dumps)
_nested = st.integers(1, 300).map(lambda levels: b'{"items":' * levels + b"1" + b"}" * levels)
_broken = st.sampled_from(
    [b"NaN", b"1e999", b'"\xff"', b'"\\ud83d"', b'"\xed\xa0\xbd"', b"", b'"' + b"x" * 100_000 + b'"']
)
_where = st.sampled_from([(*request, path) for request, body in BODIES.items() for path in paths(body)])


def _worse(harness: str, url: str, path: tuple[Any, ...], value: bytes) -> bytes:
    return orjson.dumps(replaced(BODIES[harness, url], path, "HERE")).replace(b'"HERE"', value)


def defects(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server takes for a fault of its own."""
    names = ("polar_gym", "aiohttp")
    return [each.message for each in caplog.records if each.levelno >= logging.ERROR and each.name.startswith(names)]


@pytest.mark.parametrize(("harness", "url"), BODIES)
def test_the_bodies_that_are_made_worse_are_answered(gateway: Gateway, harness: str, url: str) -> None:
    status, answer = gateway.post(harness, url, orjson.dumps(BODIES[harness, url]))
    assert status == 200, answer


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=_where, value=_json | _nested | _broken)
def test_a_malformed_body_is_refused_and_leaves_nothing_behind(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, where: tuple[str, str, Any], value: bytes
) -> None:
    caplog.clear()
    harness, url, path = where
    capture = gateway.captures[harness]
    calls = len(capture.calls)
    status, answer = gateway.post(harness, url, _worse(harness, url, path, value))
    assert status in (200, 400), answer
    counted = "count" in url or "input_tokens" in url
    assert len(capture.calls) - calls == (0 if counted or status != 200 else 1)
    if status == 400:
        error = orjson.loads(answer)["error"]
        assert error["message"]
    assert defects(caplog) == []


@pytest.mark.parametrize(("harness", "url"), BODIES)
def test_a_body_that_its_headers_call_compressed_is_refused(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, harness: str, url: str
) -> None:
    """Guards against a 500 and two tracebacks for what a client did."""
    body = orjson.dumps(BODIES[harness, url])
    status, answer = gateway.post(harness, url, body, {"Content-Encoding": "gzip"})
    assert status == 415
    assert "Content-Encoding: gzip" in orjson.loads(answer)["error"]["message"]
    assert defects(caplog) == []
    status, _ = gateway.post(harness, url, body)
    assert status == 200, "the connection can be used again"


def test_half_of_a_surrogate_pair_is_a_replacement_character(gateway: Gateway) -> None:
    """Guards against a session that ends because a harness cut a tool's output in the middle of an emoji: JavaScript
    writes what is left as an escape that strict parsers refuse. Whole pairs and escaped backslashes stay."""
    said = rb"cut \ud83d, \uDE00\ud83d\ude00\n\\ud83d \ud83d\ud83e\udd8a"
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % said
    assert gateway.post("opencode", "/v1/chat/completions", body)[0] == 200
    (message,) = gateway.captures["opencode"].calls[-1].messages
    assert message["content"] == "cut \ufffd, \ufffd\U0001f600\n\\ud83d \ufffd\U0001f98a"
