"""The least that a recording proxy on aiohttp can cost: `python -m benchmarks.floor --answer FILE --state DIR`.

A handler that does nothing else parses the request's JSON, parses the JSON of an engine's answer (the bytes in FILE,
received long before), appends these bytes to a file by one `write()`, and answers. It looks nothing up and checks
nothing. With `--engine URL` it asks an engine twice instead, as a spliced call does: to template the new messages, and
to sample from ids. The bodies were made long before, the streamed answer is read as bytes and not parsed, and a tenth
of it is written, as a spliced call's journal has no prompt. It prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from polar_gym.http.careful import SERVER_OPTIONS

SAID = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 340}}]})
NEW = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Apple 1"}]
NEW += [{"role": "user", "content": "word " * 50}]


def asked(answer: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return paths and bodies of the requests of a spliced call whose prompt is that of the answer."""
    sampled = {
        "messages": NEW,
        "prompt_token_ids": orjson.loads(answer)["prompt_token_ids"],
        "stream": True,
        "stream_interval": 64,
    }
    return ("/tokenize", orjson.dumps({"messages": NEW})), ("/v1/chat/completions", orjson.dumps(sampled))


async def serve(answer: bytes, journal: Path, engine: str | None) -> None:
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    requests = asked(answer) if engine else ()
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())

    async def handle(request: web.BaseRequest) -> web.Response:
        orjson.loads(await request.read())
        for path, body in requests:
            async with client.post(f"{engine}{path}", data=body) as answered:
                await answered.read()
        if not requests:
            orjson.loads(answer)
        os.write(file, answer[: len(answer) // 10] if requests else answer)
        return web.Response(body=SAID, content_type="application/json")

    server = web.Server(handle, **SERVER_OPTIONS)  # pyright: ignore[reportArgumentType]
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--engine")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.answer.read_bytes(), arguments.state / "journal", arguments.engine))


if __name__ == "__main__":
    main()
