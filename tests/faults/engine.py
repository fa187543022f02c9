"""An engine process that can be killed: vLLM's HTTP form around the embedded engine, and a file of what it answered.

    python -m tests.faults.engine --port P --log FILE [--delay SECONDS]

Every answer is `answer <nonce>`, with a nonce that is sampled once in the world, so that whoever finds the nonce has
found the answer. The log has a line for each answer, written when all of it was handed to the kernel: which run of a
harness asked (`run_of`), how many messages there were, the nonce and the sampled ids.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from polar_gym.chat import ChatRequest, Completion
from polar_gym.chat.messages import assistant_message
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.schema import Message, Sampling
from tests.support.vllm_stand_in import as_asked

MODEL = "policy"
ANSWER = "answer "
RUN = "run "
MAX_MODEL_LEN = 131_072


class NoncePolicy(ScriptedPolicy):
    def next_message(self, request: ChatRequest) -> Message:
        return assistant_message(f"{ANSWER}{uuid.uuid4().hex}", None, [])


class NonceEngine(EmbeddedEngine):
    def __init__(self) -> None:
        super().__init__(EmbeddedOptions())
        self._policy = NoncePolicy(EmbeddedOptions(max_model_len=MAX_MODEL_LEN))


class Server:
    def __init__(self, log: Path, delay_seconds: float) -> None:
        self._engine = NonceEngine()
        self._delay = delay_seconds
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def app(self) -> web.Application:
        await self._engine.start()
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        return app

    async def _models(self, http: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [entry]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        ids = await self._engine.template(body["messages"], body.get("tools") or [])
        return web.json_response({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids.tolist()})

    async def _detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": await self._engine.decode(orjson.loads(await http.read())["tokens"])})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        request = ChatRequest(
            model=MODEL,
            messages=body["messages"],
            max_tokens=body.get("max_tokens"),
            prompt_ids=None if given is None else np.asarray(given, np.int32),
        )
        if self._delay and request.max_tokens != 1:
            await asyncio.sleep(random.uniform(0.5, 1.5) * self._delay)
        completion = await self._engine.chat(request, Sampling())
        whole = web.Response(body=orjson.dumps(_answer(completion)), content_type="application/json")
        answer = as_asked(body, whole)
        assert isinstance(answer.body, bytes)
        response = web.StreamResponse(headers={"Content-Type": answer.content_type})
        response.content_length = len(answer.body)
        await response.prepare(http)
        await response.write(answer.body)
        await response.write_eof()
        self._note(request, completion)
        return response

    def _note(self, request: ChatRequest, completion: Completion) -> None:
        if (run := run_of(request.messages)) is None:
            return  # a node's probe
        line = {
            "at": time.time(),
            "run": run,
            "messages": len(request.messages),
            "nonce": completion.message["content"].removeprefix(ANSWER),
            "ids": completion.response_ids.tolist(),
        }
        os.write(self._log, orjson.dumps(line) + b"\n")


def run_of(messages: Sequence[Message]) -> str | None:
    """Return the name of a harness's run: the first answer that it got, which it gets again where it is resumed; before
    that its task. None: the messages are of no harness."""
    first = str(messages[0]["content"])
    return str(messages[min(1, len(messages) - 1)]["content"]) if first.startswith(RUN) else None


def _answer(completion: Completion) -> dict[str, Any]:
    ids = completion.response_ids.tolist()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.message["content"], "tool_calls": []},
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": [{"token": "x", "logprob": 0.0, "top_logprobs": []} for _ in ids]},
        "token_ids": ids,
    }
    return {"object": "chat.completion", "choices": [choice], "prompt_token_ids": completion.prompt_ids.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    web.run_app(
        Server(given.log, given.delay).app(), host="127.0.0.1", port=given.port, print=lambda _: None, access_log=None
    )


if __name__ == "__main__":
    main()
