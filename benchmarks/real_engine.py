"""Measures calls of a real engine through the gateway: `python -m benchmarks.real_engine --engine URL`.

A call continues an answer: spliced, streamed as the engine samples it, and journaled. The same conversation goes to the
engine directly, in alternating rounds. Each connection repeats one request, so that the engine finds the whole prompt
in its prefix cache: it answers sooner than in any rollout, and the gateway's share of a call is at its largest.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import time

import httpx
import numpy as np

from benchmarks.load import Caller, cpu_seconds
from benchmarks.proxy import Subject, gateway
from benchmarks.report import Table, machine
from benchmarks.wires import CHAT, RESULT_TOKENS, Body, text

ROUNDS = 5
SAID = re.compile(rb'"(?:content|reasoning|reasoning_content)": ?"[^"]')
"""Matches an event that has text."""
COLUMNS = (
    *("c", "first token, direct: p50 ms", "p99", "added to p50", "added to p99"),
    *("whole call, direct: p50 ms", "p99", "added to p50", "added to p99"),
    *("gateway's share of the whole call", "its CPU ms per call"),
)


def _talked(body: Body, answer: Body, result: str) -> Body:
    """Continue after an answer of any model, whether it calls a tool or not."""
    said = answer["choices"][0]["message"].get("content") or ""
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    return {**body, "messages": [*body["messages"], *more]}


TALK = dataclasses.replace(CHAT, following=_talked)


@dataclasses.dataclass
class Times:
    """The seconds of each call until its first token and until its end, and the server's CPU seconds."""

    first: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)
    cpu: float = 0.0

    async def take(self, subject: Subject, connections: int, seconds: float) -> None:
        """Have so many connections repeat their requests for a while."""
        began, until = sum(map(cpu_seconds, subject.pids)), time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(connections):
                group.create_task(self._keep_asking(subject.port, subject.request(number), until))
        self.cpu += sum(map(cpu_seconds, subject.pids)) - began

    async def _keep_asking(self, port: int, request: bytes, until: float) -> None:
        async with Caller(port) as caller:
            while (began := time.perf_counter()) < until:
                first = None
                async for event in caller.pieces(request):
                    if first is None and SAID.search(event):
                        first = time.perf_counter() - began
                self.whole.append(time.perf_counter() - began)
                self.first.append(first or self.whole[-1])  # a model may sample no text


def direct(url: str, body: Body) -> Subject:
    """Return the request for the engine itself, whose answer has ids and logprobs as the gateway asks for them."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    body = TALK.following(body, answer, text(RESULT_TOKENS))
    request = TALK.request("none", {**body, "return_token_ids": True, "logprobs": True}, stream=True)
    return Subject("direct", httpx.URL(url).port or 80, [], lambda _: request)


def row(connections: int, engine: Times, own: Times) -> tuple[int | float, ...]:
    """Return the figures under `COLUMNS`."""
    figures: list[float] = []
    for base, found in ((engine.first, own.first), (engine.whole, own.whole)):
        p50, p99 = np.percentile(base, [50, 99]) * 1e3
        own_p50, own_p99 = np.percentile(found, [50, 99]) * 1e3
        figures += [p50, p99, own_p50 - p50, own_p99 - p99]
    figures += [1 - np.median(engine.whole) / np.median(own.whole), own.cpu / len(own.whole) * 1e3]
    return connections, *map(float, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", required=True, help="URL of a vLLM server on this machine")
    parser.add_argument("--model", default="policy", help="the name under which it serves (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="pieces of text in the prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round (default: %(default)s)")
    options = parser.parse_args()
    opening = {**CHAT.opening(options.tokens), "model": options.model, "max_tokens": options.answer}
    wire = dataclasses.replace(TALK, opening=lambda _: opening)
    rows = []
    with gateway(options.engine, "--streaming", "real", sessions=max(options.connections)) as node:
        spliced = node.following(wire, options.tokens, stream=True, sessions=max(options.connections))
        alone = direct(options.engine, opening)
        for connections in options.connections:
            engine, own = Times(), Times()
            for _ in range(ROUNDS):
                asyncio.run(engine.take(alone, connections, options.seconds))
                asyncio.run(own.take(spliced, connections, options.seconds))
            rows.append(row(connections, engine, own))
    print(machine())
    print(Table(columns=COLUMNS, rows=rows).markdown())


if __name__ == "__main__":
    main()
