"""An engine in vLLM's form, fast, that knows what it sampled: a token is a byte, and an answer is chance.

What an answer looks like is ordered in the last message: `tokens-40` (how many), `stall-10` (no more after ten, until
the request is aborted or left), `pace-5` (milliseconds for a token), `tool` (a tool call), `surrogate` (a tool call
with half a surrogate pair, which vLLM refuses after sampling where the answer is not streamed).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.exactness.choices import experts_of, kept_at, to_npy
from tests.support.listening import listen, stop_listening

SPECIAL = ("<|im_start|>", "<|im_end|>")
START, END = 256, 257
MAX_MODEL_LEN = 32_768
ORDER = re.compile(r"\b(tokens|stall|pace)-(\d+)|\b(tool|surrogate)\b")
PIECE = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")
TAG = "<tool_call>"
CHAT = "/v1/chat/completions"
LIKELY = {0.5: (-0.3677, -1.1787), 1.0: (-0.5108, -0.9163)}
"""Temperature -> the logprobs of the two tokens that an answer may begin with."""
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def encode(text: str) -> list[int]:
    """Return the ids of a text: its bytes, and one id for each special text."""
    ids: list[int] = []
    for piece in PIECE.split(text):
        ids += [256 + SPECIAL.index(piece)] if piece in SPECIAL else list(piece.encode())
    return ids


def decode(ids: list[int]) -> str:
    """Return the text of ids."""
    text, run = "", bytearray()
    for token in ids:
        if token < 256:
            run.append(token)
        else:
            text += run.decode("utf-8", "replace") + SPECIAL[token - 256]
            run = bytearray()
    return text + run.decode("utf-8", "replace")


def template(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    """Return the ids of a conversation and of the opening of the next answer."""
    head = f"{SPECIAL[0]}system\n{json.dumps(tools)}{SPECIAL[1]}\n" if tools else ""
    turns = (f"{SPECIAL[0]}{message['role']}\n{_said(message)}{SPECIAL[1]}\n" for message in messages)
    return encode(head + "".join(turns) + f"{SPECIAL[0]}assistant\n")


def _said(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        shown = {"name": call["function"]["name"], "arguments": json.loads(arguments or "{}")}
        text += f"<tool_call>{json.dumps(shown)}</tool_call>"
    return text


@dataclass(slots=True)
class Sampled:
    """One request: what was sampled for it so far."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    pace: float
    stall: int | None
    refused: bool
    """Whether an answer that is not streamed is refused after sampling."""
    done: int = 0
    """How many tokens were sampled so far."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class StandIn:
    """The engine. `url` is known after `start`; `sampled` counts tokens as vLLM's counter does."""

    def __init__(self, seed: int = 0, own_grammar: bool = False, logits: bool = False, records: bool = True) -> None:
        self.url = ""
        self.sampled = 0
        self._seed = seed
        self._own_grammar = own_grammar
        self._logits = logits
        self._records = records
        self._asked: Counter[bytes] = Counter()
        self._running: dict[str, Sampled] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        for path, handler in (
            (CHAT, self._chat),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            (f"{CHAT}/render", self._render),
            (f"{CHAT}/derender", self._derender),
            ("/inference/v1/generate", self._generate),
            ("/abort_requests", self._abort),
            ("/inference/v1/abort_requests", self._abort),
        ):
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        self._listening = await listen(self._runner, self._port)
        self._port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """End as a killed process does: all connections break. `start` begins again on the same port."""
        assert self._runner is not None
        server = self._runner.server
        for connection in list(server.connections) if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await stop_listening(self._runner, self._listening)
        self._running.clear()

    # What is asked beside answers ---------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "root": "policy", "max_model_len": MAX_MODEL_LEN}]})

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.sampled}\n')

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await http.json()
        ids = template(body["messages"], body.get("tools"))
        return web.json_response({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids})

    async def _detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": decode((await http.json())["tokens"])})

    async def _abort(self, http: web.Request) -> web.Response:
        for name in (await http.json())["request_ids"]:
            for request_id, sampled in self._running.items():
                if name in request_id:
                    sampled.aborted.set()
        return web.Response()

    # Sampling -----------------------------------------------------------------------------------------------------

    def _sample(self, prompt: list[int], body: dict[str, Any]) -> Sampled:
        """Decide on a whole answer, by the prompt and how often it was asked."""
        key = hashlib.blake2b(str(prompt).encode(), digest_size=16).digest()
        self._asked[key] += 1
        chance = random.Random(f"{self._seed}{key.hex()}{self._asked[key]}")
        orders = {found[1] or found[3]: int(found[2] or 0) for found in ORDER.finditer(_last_turn(prompt))}
        words = "".join(chance.choices(LETTERS, k=max(1, orders.get("tokens", chance.randint(5, 120)) - 1)))
        if "surrogate" in orders:
            words += '<tool_call>{"name": "bash", "arguments": {"command": "fox \\ud83e"}}</tool_call>'
        elif "tool" in orders:
            words += f'<tool_call>{{"name": "bash", "arguments": {{"command": "echo {words[:9]}"}}}}</tool_call>'
        limit = body.get("max_tokens") or (body.get("sampling_params") or {}).get("max_tokens") or MAX_MODEL_LEN
        ids = [*encode(words), END][:limit]
        low = 5.0 if self._logits else -5.0
        return Sampled(
            prompt=prompt,
            ids=ids,
            logprobs=[round(chance.uniform(min(0.0, low), max(0.0, low)), 6) for _ in ids],
            pace=orders.get("pace", 0) / 1000,
            stall=orders.get("stall"),
            refused="surrogate" in orders,
        )

    async def _run(self, sampled: Sampled, interval: int) -> AsyncIterator[tuple[int, int]]:
        """Sample in steps as long as nobody aborts, and yield the pieces that a stream shows."""
        shown = 0
        while sampled.done < len(sampled.ids) and not sampled.aborted.is_set():
            if sampled.stall is not None and sampled.done >= sampled.stall:
                await sampled.aborted.wait()
                break
            sampled.done += 1
            self.sampled += 1
            if sampled.pace:
                await asyncio.sleep(sampled.pace)
            elif sampled.done % 32 == 0:
                await asyncio.sleep(0)
            if shown == 0 or sampled.done - shown >= interval:
                yield shown, sampled.done
                shown = sampled.done
        if shown < sampled.done or sampled.aborted.is_set() or not sampled.done:
            yield shown, sampled.done

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        sampled = self._sample(given or template(body["messages"], body.get("tools")), body)
        request_id = f"chatcmpl-{http.headers.get('X-Request-Id') or body.get('request_id') or id(sampled)}"
        self._running[request_id] = sampled
        try:
            if body.get("stream"):
                return await self._streamed(http, body, sampled, request_id)
            async for _ in self._run(sampled, 1):
                pass
            if sampled.refused:
                error = {"message": "'utf-8' codec can't encode: surrogates not allowed", "code": 400}
                return web.json_response({"error": error}, status=400)
            choice = self._choice(sampled, 0, sampled.done, body)
            message, reason = _message(sampled.ids[: sampled.done], sampled)
            choice |= {"message": message, "finish_reason": reason}
            return web.json_response({"id": request_id, "prompt_token_ids": sampled.prompt, "choices": [choice]})
        finally:
            self._running.pop(request_id, None)

    async def _streamed(
        self, http: web.Request, body: dict[str, Any], sampled: Sampled, request_id: str
    ) -> web.StreamResponse:
        response = await _stream(http)
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await _event(response, {"id": request_id, "prompt_token_ids": sampled.prompt, "choices": [role]})
        async for start, end in self._run(sampled, body.get("stream_interval") or 1):
            choice = self._choice(sampled, start, end, body) | {"finish_reason": None}
            message, reason = _message(sampled.ids[:end], sampled)
            before, _ = _message(sampled.ids[:start], sampled)
            choice["delta"] = {"content": message["content"][len(before["content"]) :]}
            if message["tool_calls"] and not before["tool_calls"]:
                choice["delta"]["tool_calls"] = [{"index": 0, **message["tool_calls"][0]}]
            if end == len(sampled.ids) or sampled.aborted.is_set():
                choice["finish_reason"] = reason
            await _event(response, {"id": request_id, "choices": [choice]})
        await _done(response, body, sampled)
        return response

    def _choice(self, sampled: Sampled, start: int, end: int, body: dict[str, Any]) -> dict[str, Any]:
        likely = [
            {"logprob": value}
            for value in ((9.0, 7.0) if self._logits else LIKELY.get(body.get("temperature") or 1.0, (-0.9, -0.9)))
        ]
        entries = [
            {"token": "x", "logprob": value} | ({"top_logprobs": likely} if body.get("top_logprobs") else {})
            for value in sampled.logprobs[start:end]
        ]
        return {"index": 0, "token_ids": sampled.ids[start:end], "logprobs": {"content": entries}}

    # Token in, token out ------------------------------------------------------------------------------------------

    async def _render(self, http: web.Request) -> web.Response:
        body = await http.json()
        parameters: dict[str, Any] = {"max_tokens": body.get("max_tokens")}
        if self._own_grammar and body.get("tools"):
            parameters["structured_outputs"] = {"structural_tag": "{}"}
        ids = template(body["messages"], body.get("tools"))
        return web.json_response({"token_ids": ids, "sampling_params": parameters, "reasoning_ended": False})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        sampled = self._sample(body["token_ids"], body)
        request_id = f"generate-tokens-{http.headers.get('X-Request-Id') or id(sampled)}"
        self._running[request_id] = sampled
        try:
            if body.get("stream"):
                return await self._streamed_ids(http, body, sampled)
            async for _ in self._run(sampled, 1):
                pass
            choice = self._ids(sampled, 0, sampled.done, body)
            return web.json_response({"prompt_token_ids": sampled.prompt, "choices": [choice]})
        finally:
            self._running.pop(request_id, None)

    async def _streamed_ids(self, http: web.Request, body: dict[str, Any], sampled: Sampled) -> web.StreamResponse:
        response = await _stream(http)
        prompt: list[int] | None = sampled.prompt
        async for start, end in self._run(sampled, body["sampling_params"].get("stream_interval") or 1):
            choice = self._ids(sampled, start, end, body)
            await _event(response, {"prompt_token_ids": prompt, "choices": [choice]})
            prompt = None
        await _done(response, body, sampled)
        return response

    def _ids(self, sampled: Sampled, start: int, end: int, body: dict[str, Any]) -> dict[str, Any]:
        choice = self._choice(sampled, start, end, body) | {"finish_reason": None}
        before = len(sampled.prompt)
        if self._records:
            choice["sampling_mask"] = [kept_at(before + place, sampled.ids[place]) for place in range(start, end)]
        last = end == len(sampled.ids) or sampled.aborted.is_set()
        if last and self._records:
            known = body["sampling_params"].get("routed_experts_prompt_start") or 0
            choice["routed_experts"] = to_npy(experts_of([*sampled.prompt, *sampled.ids[:end]])[known:-1])
        if last:
            _, reason = _message(sampled.ids[:end], sampled)
            choice["finish_reason"] = "stop" if reason == "tool_calls" else reason
            choice["weight_versions"] = [{"version": "default", "start": 0, "end": end}]
        return choice

    async def _derender(self, http: web.Request) -> web.Response:
        choice = (await http.json())["generate_response"]["choices"][0]
        message, reason = _parsed(decode(choice["token_ids"])), "stop"
        return web.json_response({"choices": [{"message": message, "finish_reason": reason}]})


def _last_turn(prompt: list[int]) -> str:
    """Return the text of the last turn before the answer."""
    turns = [place for place, token in enumerate(prompt) if token == START]
    return decode(prompt[turns[-2] : turns[-1]]) if len(turns) > 1 else ""


def _parsed(text: str) -> dict[str, Any]:
    content, _, call = text.partition(TAG)
    if not call:
        content = content.removesuffix(
            next((TAG[:size] for size in range(len(TAG), 0, -1) if content.endswith(TAG[:size])), "")
        )
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": []}
    if call.endswith("</tool_call>"):
        said = json.loads(call.removesuffix("</tool_call>"))
        function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
        message["tool_calls"] = [{"id": f"call-{random.getrandbits(64):x}", "type": "function", "function": function}]
    return message


def _message(ids: list[int], sampled: Sampled) -> tuple[dict[str, Any], str]:
    """Return the message of these ids as vLLM's parsers see it, and the finish reason."""
    ended = bool(ids) and ids[-1] == END
    message = _parsed(decode(ids[:-1] if ended else ids))
    if sampled.aborted.is_set() and not ended:
        return message, "abort"
    return message, ("tool_calls" if message["tool_calls"] else "stop") if ended else "length"


async def _stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    return response


async def _done(response: web.StreamResponse, body: dict[str, Any], sampled: Sampled) -> None:
    """Send the end of a stream, with the engine's count of tokens where the request wants the count."""
    if (body.get("stream_options") or {}).get("include_usage"):
        await _event(response, {"choices": [], "usage": {"completion_tokens": sampled.done}})
    await _write(response, b"[DONE]")
    await response.write_eof()


async def _event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await _write(response, json.dumps(data).encode())


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        await response.write(b"data: " + data + b"\n\n")
    except ConnectionError as gone:
        raise asyncio.CancelledError from gone  # aiohttp logs every other exception
