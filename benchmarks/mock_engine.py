"""A server with vLLM's API that answers at once. Benchmarks use it in place of a GPU.

`python -m benchmarks.mock_engine` listens on a free port and prints the port. Answers have vLLM's form and size: the
ids of the prompt, sampled ids, one logprob entry for each. The server templates and tokenises (pieces of six bytes; new
pieces extend the vocabulary) and honours pre-tokenised prompts, so that token-in/token-out works as with the real
engine. The answer is always the same. The code uses `asyncio.Protocol` and keeps every repeated part as bytes, so that
the server's cost is small beside the cost of the measured gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import orjson

MODEL = "policy"
PIECE = 6
"""Bytes of text for one token."""
START, END, NEWLINE = 1, 2, 3
SPECIAL = {START: b"<|im_start|>", END: b"<|im_end|>", NEWLINE: b"\n"}
FIRST_ID = 20_000
"""The first id of text. Ids have five digits, as most ids of a real vocabulary have."""
MAX_MODEL_LEN = 131_072
SPOKEN = b"I look. "
EVENTS = b"text/event-stream"

Later = Callable[[Callable[[], None], int], object]
"""Calls a function when the next event of a stream is due. The number is that of the event's tokens."""

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
PATH = re.compile(rb"[A-Z]+ ([^ ?]+)")
PROMPT_IDS = re.compile(rb'"prompt_token_ids": ?\[([0-9, ]*)\]')


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the model's context; the message is like vLLM's."""


class Vocabulary:
    """Pieces of text and their ids, in the order in which they were first seen."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._pieces: list[bytes] = []

    def encode(self, text: bytes) -> list[int]:
        return [self._id(text[start : start + PIECE]) for start in range(0, len(text), PIECE)]

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(SPECIAL.get(each) or self._pieces[each - FIRST_ID] for each in ids)

    def _id(self, piece: bytes) -> int:
        known = self._ids.get(piece)
        if known is None:
            known = self._ids[piece] = FIRST_ID + len(self._pieces)
            self._pieces.append(piece)
        return known


VOCABULARY = Vocabulary()


@lru_cache(maxsize=100_000)
def turn_ids(said: bytes) -> bytes:
    """Return the ids of one message, joined by commas."""
    return joined([START, *VOCABULARY.encode(said), END, NEWLINE])


def template(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> bytes:
    """Return the ids of a conversation and of the opening of the next answer, joined by commas."""
    parts = [turn_ids(b"tools\n" + orjson.dumps(tools))] if tools else []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        parts.append(turn_ids(f"{message['role']}\n{text}".encode() + (orjson.dumps(calls) if calls else b"")))
    parts.append(joined([START, *VOCABULARY.encode(b"assistant\n")]))
    return b",".join(parts)


def joined(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


class Answer:
    """The only answer of this engine, cut into the parts that do not change."""

    def __init__(self, ids: Sequence[int], text: str) -> None:
        self.ids, self.text = list(ids), text
        self.entries = [
            {
                "token": " word",
                "logprob": -(index % 977) / 977 - 0.0123456789,
                "bytes": [32, 119, 111, 114, 100],
                "top_logprobs": [],
            }
            for index in range(len(self.ids))
        ]
        arguments = {"name": "bash", "arguments": '{"command": "ls -la"}'}
        self.call = {"id": "chatcmpl-tool-0123456789abcdef", "type": "function", "function": arguments}
        named = [entry | {"token": f"token_id:{each}"} for entry, each in zip(self.entries, self.ids, strict=True)]
        chosen = {"index": 0, "token_ids": self.ids, "logprobs": {"content": named}, "finish_reason": "stop"}
        self.generated = orjson.dumps({"request_id": "0", "choices": [chosen]})
        """The answer to a prompt of ids, without chat around it."""
        drawn = [[entry["logprob"], each, None] for entry, each in zip(self.entries, self.ids, strict=True)]
        told = {"meta_info": {"completion_tokens": len(self.ids), "output_token_logprobs": drawn}}
        alone = orjson.loads(self._choice(called=False)) | told
        del alone["token_ids"]
        self.of_sglang = self._head(b"chat.completion") + b',"choices":[' + orjson.dumps(alone) + b"]}"
        """The answer to `input_ids`, in SGLang's form."""
        self._with_calls, self._without = self._choice(called=True), self._choice(called=False)
        self._streamed: dict[tuple[bool, int], bytes] = {}
        """The events after the first one, by whether a tool is called and by the tokens in one event."""

    def whole(self, prompt: bytes, called: bool) -> bytes:
        choice = self._with_calls if called else self._without
        return self._head(b"chat.completion") + b',"choices":[' + choice + b"]" + self._prompt(prompt) + b"}"

    def stream(self, prompt: bytes, called: bool, interval: int) -> bytes:
        if (called, interval) not in self._streamed:
            self._streamed[called, interval] = self._events(called=called, interval=interval)
        role = b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        first = b"data: " + self._head(b"chat.completion.chunk") + b"," + role + self._prompt(prompt) + b"}\n\n"
        return first + self._streamed[called, interval] + b"data: [DONE]\n\n"

    def probed(self, prompt: bytes, temperature: float) -> bytes:
        """Return an answer with the likeliest tokens: the gaps between their logprobs say how logprobs are computed."""
        normaliser = math.log(sum(math.exp(-rank / temperature) for rank in range(11)))
        logprobs = [-rank / temperature - normaliser for rank in range(11)]
        top = [{"token": str(rank), "logprob": logprob, "bytes": [48]} for rank, logprob in enumerate(logprobs)]
        content = [top[0] | {"top_logprobs": top}]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": content},
            "finish_reason": "length",
            "token_ids": self.ids[:1],
        }
        return (
            self._head(b"chat.completion") + b',"choices":[' + orjson.dumps(choice) + b"]" + self._prompt(prompt) + b"}"
        )

    def _head(self, kind: bytes) -> bytes:
        return b'{"id":"chatcmpl-0","object":"' + kind + b'","created":1,"model":"' + MODEL.encode() + b'"'

    def _prompt(self, prompt: bytes) -> bytes:
        read, said = prompt.count(b",") + 1, len(self.ids)
        usage = {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
        return b',"usage":' + orjson.dumps(usage) + b',"prompt_token_ids":[' + prompt + b"]"

    def _choice(self, *, called: bool) -> bytes:
        message = {"role": "assistant", "content": self.text, "reasoning": None, "tool_calls": [self.call] * called}
        return orjson.dumps(
            {
                "index": 0,
                "message": message,
                "logprobs": {"content": self.entries},
                "finish_reason": "tool_calls" if called else "stop",
                "stop_reason": None,
                "token_ids": self.ids,
            }
        )

    def _events(self, *, called: bool, interval: int) -> bytes:
        """Return the sampled tokens as vLLM streams them: the first one alone, then `interval` at a time."""
        events = []
        cuts = [0, *range(1, len(self.ids), interval), len(self.ids)]
        for start, end in pairwise(cuts):
            last = end == len(self.ids)
            delta: dict[str, Any] = {"content": self.text[start * PIECE : None if last else end * PIECE]}
            if last and called:
                delta["tool_calls"] = [{"index": 0, **self.call}]
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": {"content": self.entries[start:end]},
                "finish_reason": ("tool_calls" if called else "stop") if last else None,
                "token_ids": self.ids[start:end],
            }
            events.append(
                b"data: " + self._head(b"chat.completion.chunk") + b',"choices":[' + orjson.dumps(choice) + b"]}\n\n"
            )
        usage = {"completion_tokens": len(self.ids)}
        counted = b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return b"".join([*events, b"data: ", self._head(b"chat.completion.chunk"), counted])


class Connection(asyncio.Protocol):
    """HTTP/1.1, one request after the other, to the extent that the clients here need."""

    def __init__(self, answer: Answer, later: Later | None) -> None:
        """`later`: None: the events of a stream are sent at once."""
        self._answer = answer
        self._later = later
        self._received = bytearray()
        self._wanted = 0
        """Bytes of the incoming request; 0: its headers are not complete."""
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._complete():
            request, self._received = bytes(self._received[: self._wanted]), self._received[self._wanted :]
            path, body = PATH.match(request), request[self._body_at :]
            self._wanted = 0
            status = b"200 OK"
            try:
                kind, said = self._said(path[1] if path else b"", body)
            except PromptTooLongError as error:
                refusal = {"message": str(error), "type": "BadRequestError", "param": "input_tokens", "code": 400}
                status, kind, said = b"400 Bad Request", b"application/json", orjson.dumps({"error": refusal})
            head = b"HTTP/1.1 " + status + b"\r\nContent-Type: " + kind + b"\r\n"
            if self._later and kind == EVENTS:
                self._transport.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
                events = [event + b"\n\n" for event in said.removesuffix(b"\n\n").split(b"\n\n")]
                self._send_next(events, self._later)
            else:
                self._transport.write(head + b"Content-Length: %d\r\n\r\n" % len(said) + said)

    def _send_next(self, events: Sequence[bytes], later: Later) -> None:
        """Send each event as a chunk when it is due."""
        if not events:
            self._transport.write(b"0\r\n\r\n")
            return

        def send() -> None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(events[0]), events[0]))
            self._send_next(events[1:], later)

        later(send, events[0].count(b'"logprob":'))

    def _complete(self) -> bool:
        if not self._wanted:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = LENGTH.search(self._received, 0, end)
            self._body_at = end + 4
            self._wanted = self._body_at + (int(length[1]) if length else 0)
        return len(self._received) >= self._wanted

    def _said(self, path: bytes, raw: bytes) -> tuple[bytes, bytes]:
        json = b"application/json"
        if path == b"/v1/chat/completions":
            return self._chat(raw)
        if path == b"/inference/v1/generate":
            return json, self._answer.generated
        if path == b"/tokenize":
            body = orjson.loads(raw)
            ids = (
                template(body["messages"], body.get("tools") or [])
                if "messages" in body
                else joined(VOCABULARY.encode(body["prompt"].encode()))
            )
            return json, b'{"count":%d,"max_model_len":%d,"tokens":[' % (
                ids.count(b",") + 1,
                MAX_MODEL_LEN,
            ) + ids + b"]}"
        if path == b"/detokenize":
            return json, orjson.dumps({"prompt": VOCABULARY.decode(orjson.loads(raw)["tokens"]).decode()})
        entry = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": MAX_MODEL_LEN}
        return json, orjson.dumps({"object": "list", "data": [entry]})

    def _chat(self, raw: bytes) -> tuple[bytes, bytes]:
        given, body = PROMPT_IDS.search(raw), orjson.loads(raw)
        if "input_ids" in body:
            return b"application/json", self._answer.of_sglang
        prompt = given[1] if given else template(body["messages"], body.get("tools") or [])
        if (tokens := prompt.count(b",") + 1) > MAX_MODEL_LEN:
            raise PromptTooLongError(
                f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains "
                f"{tokens} input tokens. Please reduce the length of the input messages."
            )
        if body.get("top_logprobs"):
            return b"application/json", self._answer.probed(prompt, body.get("temperature", 1.0))
        called = bool(body.get("tools"))
        if body.get("stream"):
            return EVENTS, self._answer.stream(prompt, called, body.get("stream_interval", 1))
        return b"application/json", self._answer.whole(prompt, called)


def long_answer(tokens: int) -> Answer:
    """Return an answer of so many tokens of text."""
    said = VOCABULARY.encode(SPOKEN * tokens)[: tokens - 1]
    return Answer([*said, END], VOCABULARY.decode(said).decode())


async def serve(answer: Answer, later: Later | None) -> None:
    """Print the port and answer until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answer, later), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer-tokens", type=int, default=340)
    parser.add_argument("--ids", help="sampled ids, separated by commas: for clients with a tokenizer of their own")
    parser.add_argument("--text", default="", help="what those ids say")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between the events of a stream")
    arguments = parser.parse_args()
    if arguments.ids:
        answer = Answer([int(each) for each in arguments.ids.split(",")], arguments.text)
    else:
        answer = long_answer(arguments.answer_tokens)
    pace = arguments.pace
    asyncio.run(serve(answer, (lambda send, _: asyncio.get_running_loop().call_later(pace, send)) if pace else None))


if __name__ == "__main__":
    main()
