"""Measures the live page of a rollout server with many nodes: what each open page costs the server and its browser."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np

from polar_gym.client import RolloutClient
from polar_gym.protocol import Transcript
from tests.lifecycle.peer_node import PeerNode, make_request
from tests.lifecycle.server_process import ServerProcess, server_process
from tests.lifecycle.service_fixtures import NODE_KEY, SERVICE_KEY
from tests.support.browser import browsing
from tests.support.made_runs import WORDS

SAMPLES = 8
CALL_SECONDS = 10
"""How long a session takes for a call: so often its transcript changes."""
HEARTBEAT_SECONDS = 2

FRAMES = """const [seconds, scrolls, done] = arguments;
const times = [performance.now()], begun = times[0];
const step = (now) => {
  times.push(now);
  if (scrolls) scrollBy(0, 100);
  now - begun < 1000 * seconds ? requestAnimationFrame(step) : done(times);
};
requestAnimationFrame(step);"""

COUNT = """window.made = 0;
new MutationObserver((all) => all.forEach((each) => each.addedNodes.forEach((node) => {
  window.made += 1 + (node.querySelectorAll?.('*').length ?? 0);
}))).observe(document.body, { childList: true, subtree: true });"""
"""Counts the elements that the page makes from now on."""

FILTER = """const done = arguments[1], begun = performance.now();
const field = document.querySelector('input[type=search]');
field.value = arguments[0];
field.dispatchEvent(new Event('input', { bubbles: true }));
requestAnimationFrame(() => requestAnimationFrame((now) => done(now - begun)));"""


MORE = """const more = document.querySelector('.live .more:not([hidden])');
more?.click();
return more !== null;"""
"""Lists more of what is cut, and tells whether something was."""


@asynccontextmanager
async def busy_server(directory: Path, nodes: int, sessions: int) -> AsyncIterator[ServerProcess]:
    """Run a server whose nodes have this many running sessions in all. Each has a call every `CALL_SECONDS`."""
    places = sessions // nodes
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_process(directory, "cluster=none"))
        client = await stack.enter_async_context(RolloutClient(server.url, SERVICE_KEY))
        peers = [PeerNode(server.url, NODE_KEY, name=f"node-{number:03}", run=places) for number in range(nodes)]
        for peer in peers:
            await stack.enter_async_context(peer)
        for number in range(sessions // SAMPLES):
            await client.submit(make_request(f"intervals-{number:04}", num_samples=SAMPLES))
        for peer in peers:
            await peer.take(places)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        working = [group.create_task(_work(peer, random.Random(peer.name))) for peer in peers]
        try:
            yield server
        finally:
            for each in working:
                each.cancel()


async def _work(peer: PeerNode, draw: random.Random) -> None:
    """Tell of sessions that have a call every `CALL_SECONDS`, by a heartbeat every `HEARTBEAT_SECONDS`."""

    def line(role: str) -> tuple[str, str]:
        return role, " ".join(draw.choices(WORDS, k=50))

    said = {order.session_id: [line("user")] for order in peer.held.values()}
    calls = dict.fromkeys(said, 0)
    for second in range(10**9):
        for session_id, lines in said.items():
            if second == 0 or draw.random() < 1 / CALL_SECONDS:
                lines[:] = [*lines, line("assistant"), line("tool")][-4:]
                calls[session_id] += 1
        peer.transcripts = [
            Transcript(session_id=session_id, attempt=0, calls=calls[session_id], lines=list(lines))
            for session_id, lines in said.items()
        ]
        if second % HEARTBEAT_SECONDS == 0:
            await peer.beat()
        await asyncio.sleep(1)


async def live_page(nodes: int, sessions: int, seconds: float) -> dict[str, float]:
    """Return the figures of a server with so many nodes and running sessions, each measured for so many seconds."""
    with tempfile.TemporaryDirectory() as directory:
        async with busy_server(Path(directory), nodes, sessions) as server:
            idle, _ = await _followed(server, 0, seconds)
            one, stream = await _followed(server, 1, seconds)
            ten, _ = await _followed(server, 10, seconds)
            page = await asyncio.to_thread(_seen, server.url, seconds)
    return {
        "nodes": nodes,
        "sessions": sessions,
        "kB a second": round(stream / 1000, 1),
        "server's CPU without a page %": round(100 * idle, 1),
        "server's CPU with a page %": round(100 * one, 1),
        "server's CPU with ten pages %": round(100 * ten, 1),
        **page,
    }


async def _followed(server: ServerProcess, pages: int, seconds: float) -> tuple[float, float]:
    """Return the server's share of a core while so many pages follow it, and the bytes a second that a page gets after
    the first state."""

    async def follow() -> int:
        read, end = 0, time.monotonic() + seconds
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {SERVICE_KEY}"}, read_bufsize=2**24) as http,
            http.get(f"{server.url}/v1/live?follow=true") as response,
        ):
            await response.content.readline()
            while time.monotonic() < end:
                read += len(await response.content.readline())
        return read

    before, begun = _cpu(server), time.monotonic()
    got = await asyncio.gather(asyncio.sleep(seconds, 0), *(follow() for _ in range(pages)))
    took = time.monotonic() - begun
    return (_cpu(server) - before) / took, got[-1] / took


def _cpu(server: ServerProcess) -> float:
    """Return the seconds of a core that the server has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _seen(url: str, seconds: float) -> dict[str, float]:
    """Return what a browser needs to follow the server, and how it reads meanwhile."""
    with browsing() as browser:
        browser.driver.set_script_timeout(60)
        browser.open(url)
        browser.wait("return document.activeElement.type === 'password'")
        begun = time.monotonic()
        browser.keys(f"{SERVICE_KEY}\n")
        browser.wait("return document.querySelector('.session') !== null")
        shown = time.monotonic() - begun
        browser.run(COUNT)
        still = np.diff(browser.driver.execute_async_script(FRAMES, seconds, False))
        made = browser.run("return window.made") / seconds
        while browser.run(MORE):
            pass
        scrolling = np.diff(browser.driver.execute_async_script(FRAMES, seconds, True))
        listed = browser.run("return document.querySelectorAll('.session').length")
        answered = browser.driver.execute_async_script(FILTER, "node-001")
        return {
            "shown s": round(shown, 2),
            "elements made a second": round(made),
            "frame ms, 95 %": _high(still),
            "longest frame ms": round(float(still.max()), 1),
            "sessions listed": listed,
            "frame ms while they scroll, 95 %": _high(scrolling),
            "longest frame while they scroll ms": round(float(scrolling.max()), 1),
            "a filter is answered ms": round(answered, 1),
            "heap MB": round(browser.run("return performance.memory.usedJSHeapSize / 1e6"), 1),
            "all of Chromium MB": round(browser.memory() / 1e6),
        }


def _high(frames: np.ndarray) -> float:
    return round(float(statistics.quantiles(frames, n=20)[-1]), 1)
