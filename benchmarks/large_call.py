"""Measures how long a large call keeps the gateway from answering others: `python -m benchmarks large_call`.

While one connection sends a large call, another one asks the same gateway for its models, again and again: each answer
comes as soon as the event loop turns. *Longest wait* is the longest of these answers. The image is base64 in a message;
the text is longer than the model's context.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.load import Caller
from benchmarks.processes import LOAD_CORES
from benchmarks.proxy import Gateway, engine, gateway
from benchmarks.report import Goal, Section, Table
from benchmarks.wires import CHAT

MB = 1_000_000
MOST_MS = 20.0
MODELS = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"


def _with_image(size: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (size // 8)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]


def _with_text(size: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "0123 " * (size // 5)}]


CASES: dict[str, tuple[int, Callable[[int], list[dict[str, Any]]]]] = {
    "20 MB, an image": (20 * MB, _with_image),
    "4 MB of text": (4 * MB, _with_text),
    "20 MB of text": (20 * MB, _with_text),
}


def measure(quick: bool) -> Section:
    rows, waits = [], list[float]()
    with engine() as mock, gateway(mock.url, sessions=2) as own:
        idle = asyncio.run(_longest_wait(own, None))
        for name, (size, messages) in CASES.items():
            request = CHAT.request(own.keys[0], {"model": "policy", "messages": messages(size)})
            found = [asyncio.run(_longest_wait(own, request)) for _ in range(1 if quick else 5)]
            waits.append(max(found))
            rows.append((name, statistics.median(found), max(found), idle))
    columns = ("call", "longest wait, ms: median of the rounds", "most", "without the call")
    goal = Goal(
        claim="large_call: a call of 20 MB keeps others waiting for at most 20 ms",
        measured=f"{max(waits):.0f} ms",
        held=max(waits) <= MOST_MS,
    )
    text = (__doc__ or "").partition("\n\n")[2].strip()
    shared = " The client shares a core with the engine." if len(LOAD_CORES) == 1 else ""
    return Section(title="Large calls", text=text + shared, tables=[Table(columns=columns, rows=rows)], goals=[goal])


async def _longest_wait(own: Gateway, request: bytes | None) -> float:
    """Return the longest answer to others, in milliseconds, during a call; None: during a quarter of a second."""
    calling = asyncio.create_task(asyncio.sleep(0.25) if request is None else _call(own.port, request))
    reader, writer = await asyncio.open_connection("127.0.0.1", own.port)
    longest = 0.0
    while not calling.done():
        began = time.perf_counter()
        writer.write(MODELS.format(key=own.keys[1]).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        longest = max(longest, time.perf_counter() - began)
    writer.close()
    await calling
    return longest * 1e3


async def _call(port: int, request: bytes) -> None:
    """Make a call whose answer does not matter."""
    async with Caller(port) as caller:
        try:
            await caller.ask(request)
        except RuntimeError as refused:
            if "400" not in str(refused).partition("\r\n")[0]:
                raise
