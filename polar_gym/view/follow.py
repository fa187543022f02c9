"""The page on the loopback interface, which gets episodes as they are written.

Two routes: the page without data, and a stream of lines, one for each episode, which lasts as long as the page is open.
Each reader of the stream begins at the beginning of each file. The port asks for no key: it listens on the loopback
interface only, and refuses requests that another web page may have sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from polar_gym.durable import records
from polar_gym.errors import ConfigError
from polar_gym.http.guard import REFUSED, from_a_page
from polar_gym.http.listener import Listener
from polar_gym.schema import Episode, ModelCall
from polar_gym.view.blocks import Encoder, names_of
from polar_gym.view.page import head, line

POLL_SECONDS = 0.5
"""How often files are looked at."""

LOOPBACK = "127.0.0.1"


async def follow(
    files: Sequence[Path],
    encoder: Callable[[], Encoder],
    calls_of: Callable[[Episode], list[ModelCall]],
    port: int,
    say: Callable[[str], None],
) -> None:
    """Serve the page until the task is cancelled. `encoder` makes one for each reader, which remembers what that reader
    was told. `say` is told the URL. Raises `ConfigError` where the port is taken."""
    page = head(follows=True) + b"</body></html>\n"

    async def show(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "frame-ancestors 'none'", "Cache-Control": "no-store"}
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        lines = _lines(files, encoder(), calls_of)
        while request.transport is not None and not request.transport.is_closing():
            found = await asyncio.to_thread(next, lines, None)
            if found is None:  # an error was the last line
                break
            await (response.write(found) if found else asyncio.sleep(POLL_SECONDS))
        return response

    app = web.Application(middlewares=[_guard])
    app.add_routes([web.get("/", show), web.get("/episodes", stream)])
    try:
        bound = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise ConfigError(f"--port={port}: {error.strerror}; choose another, or 0 for any") from error
    async with Listener(app, bound, 0.0) as listener:
        say(f"http://{LOOPBACK}:{listener.port}/ (Ctrl-C ends it)")
        await asyncio.Event().wait()


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    if from_a_page(request):
        raise web.HTTPForbidden(text=REFUSED)
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=499)


def _lines(files: Sequence[Path], encoder: Encoder, calls_of: Callable[[Episode], list[ModelCall]]) -> Iterator[bytes]:
    """Yield a line for each block, and b"" whenever there is nothing new. A problem is the last line."""
    names, growing = names_of(files), [_Growing(file) for file in files]
    try:
        while True:
            for name, each in zip(names, growing, strict=True):
                for episode in each.episodes():
                    yield from map(line, encoder.blocks(name, episode, calls_of(episode)))
            yield b""
    except ConfigError as error:
        yield orjson.dumps({"error": str(error)}) + b"\n"


class _Growing:
    """A file that may be written still, or not there yet."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read = 0
        self._known: tuple[int, int] | None = None
        """The device and the number of the file, once it was there."""

    def episodes(self) -> Iterator[Episode]:
        """Yield the episodes that were added since the last call. Raises `ConfigError` for a bad line, and where
        another file has taken the place of the one that was read."""
        try:
            with self.file.open("rb") as lines:
                state = os.fstat(lines.fileno())
                if self._known not in (None, (state.st_dev, state.st_ino)) or state.st_size < self._read:
                    raise ConfigError(f"{self.file}: another file has taken its place; load the page again")
                self._known = (state.st_dev, state.st_ino)
                lines.seek(self._read)
                for text in lines:
                    if not text.endswith(b"\n"):
                        return
                    self._read += len(text)
                    yield from records([text], f"{self.file} before byte {self._read}", Episode, "an episode")
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self.file}: {error.strerror}") from error
