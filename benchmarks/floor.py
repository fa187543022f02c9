"""The least that a recording proxy on aiohttp can cost: `python -m benchmarks.floor --answer FILE --state DIR`.

A handler that does nothing else parses the request's JSON, parses the JSON of an engine's answer (the bytes in FILE,
received long before), appends these bytes to a file by one `write()`, and answers. It asks no engine, looks nothing up
and checks nothing. It prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import orjson
from aiohttp import web

from polar_gym.http.careful import SERVER_OPTIONS

SAID = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 340}}]})


async def serve(answer: bytes, journal: Path) -> None:
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def handle(request: web.BaseRequest) -> web.Response:
        orjson.loads(await request.read())
        orjson.loads(answer)
        os.write(file, answer)
        return web.Response(body=SAID, content_type="application/json")

    server = web.Server(handle, **SERVER_OPTIONS)  # pyright: ignore[reportArgumentType]
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.answer.read_bytes(), arguments.state / "journal"))


if __name__ == "__main__":
    main()
