"""The least that a recording proxy on aiohttp can cost: `python -m benchmarks.floor --answer FILE --state DIR`.

A handler that does nothing else parses the request's JSON, parses the JSON of an engine's answer (the bytes in FILE,
received long before), appends these bytes to a file by one `write()`, and answers. It looks nothing up and checks
nothing. With `--engine URL` it asks an engine twice instead, as a spliced call does: to template the new messages, and
to sample from ids. The bodies were made long before, the streamed answer is read as bytes and not parsed, and a tenth
of it is written, as a spliced call's journal has no prompt. With `--records` it also parses these answers, writes the
sampled ids and logprobs as JSON, and answers with the sampled text: no gateway that records tokens can do less. It
prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import orjson
from aiohttp import web

from polar_gym.http.careful import SERVER_OPTIONS

SAID = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 340}}]})
NEW = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Apple 1"}]
NEW += [{"role": "user", "content": "word " * 50}]


class Entry(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Entry]


class Choice(msgspec.Struct):
    delta: dict[str, Any]
    logprobs: Logprobs | None = None
    token_ids: list[int] = []


class Chunk(msgspec.Struct):
    choices: list[Choice]


CHUNKS = msgspec.json.Decoder(Chunk)


def record(tokenized: bytes, streamed: bytes) -> tuple[bytes, bytes]:
    """Return the line of the journal and the answer of a call, from the engine's two answers."""
    text, ids, logprobs = "", list[int](), list[float]()
    for event in streamed.split(b"\n\n")[1:-2]:  # after the prompt's ids, and before [DONE]
        for choice in CHUNKS.decode(event.removeprefix(b"data: ")).choices:
            text += choice.delta.get("content") or ""
            ids += choice.token_ids
            logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    line = {"new": np.array(orjson.loads(tokenized)["tokens"]), "response_ids": ids, "logprobs": logprobs}
    said = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY), orjson.dumps(said)


def asked(answer: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return paths and bodies of the requests of a spliced call whose prompt is that of the answer."""
    sampled = {
        "messages": NEW,
        "prompt_token_ids": orjson.loads(answer)["prompt_token_ids"],
        "stream": True,
        "stream_interval": 64,
    }
    return ("/tokenize", orjson.dumps({"messages": NEW})), ("/v1/chat/completions", orjson.dumps(sampled))


async def serve(answer: bytes, journal: Path, engine: str | None, *, records: bool) -> None:
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    requests = asked(answer) if engine else ()
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())

    async def handle(request: web.BaseRequest) -> web.Response:
        orjson.loads(await request.read())
        answers = []
        for path, body in requests:
            async with client.post(f"{engine}{path}", data=body) as answered:
                answers.append(await answered.read())
        if not requests:
            orjson.loads(answer)
        line, said = answer[: len(answer) // 10] if requests else answer, SAID
        if records:
            line, said = record(*answers)
        os.write(file, line)
        return web.Response(body=said, content_type="application/json")

    server = web.Server(handle, **SERVER_OPTIONS)  # pyright: ignore[reportArgumentType]
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--engine")
    parser.add_argument("--records", action="store_true", help="with --engine: parse its answers, and write the tokens")
    arguments = parser.parse_args()
    journal = arguments.state / "journal"
    asyncio.run(serve(arguments.answer.read_bytes(), journal, arguments.engine, records=arguments.records))


if __name__ == "__main__":
    main()
