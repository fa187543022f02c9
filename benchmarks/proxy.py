"""Measures a model call through the gateway against the same call to the engine: `python -m benchmarks proxy`.

There are three processes: the mock engine, the gateway, and this client. The gateway is the product's node with
capture, splicing and journal, on a separate core. Each case is measured in short rounds, direct calls and the gateway
in turn, and the median of the rounds counts. CPU is the time of all threads of the gateway's process, by call; for
`direct`, of the mock engine. Every answer carries the ids of the prompt and of 340 sampled tokens, each with its
logprob entry in vLLM's form: 84 KB for a prompt of 8k tokens.

*first* is the first call of a conversation: the engine templates it. *spliced* continues an answer of the gateway with
a tool's result. Its prompt is the ids already seen plus the new ones, sent pre-tokenised. Each connection is a separate
session and repeats one request. That costs as much as going on, and keeps the prompt's size.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import orjson

from benchmarks.load import Caller, Measured, measure
from benchmarks.processes import LOAD_CORES, ROOT, server
from benchmarks.wires import CHAT, RESULT_TOKENS, Wire, text

HEADLINE = 8192
"""Prompt tokens of the cases that the claims are about."""
SIZES = (2048, HEADLINE, 32_768)
CONNECTIONS = (1, 32, 256)


@dataclass(frozen=True, slots=True)
class Subject:
    """A server, and the request of each connection."""

    name: str
    port: int
    pids: Sequence[int]
    request: Callable[[int], bytes]
    """Number of the connection -> its request."""


@dataclass(frozen=True, slots=True)
class Pace:
    rounds: int
    seconds: float

    def compare(self, subjects: Sequence[Subject], connections: int) -> list[Measured]:
        """Measure all subjects under the same load, in turn, round after round."""
        rounds = [asyncio.run(self._round(subjects, connections)) for _ in range(self.rounds)]
        return [_median([each[index] for each in rounds]) for index in range(len(subjects))]

    async def _round(self, subjects: Sequence[Subject], connections: int) -> list[Measured]:
        measured = []
        for subject in subjects:
            requests = [subject.request(number) for number in range(connections)]
            measured.append(await measure(subject.port, requests, subject.pids, seconds=self.seconds))
        return measured


def _median(rounds: Sequence[Measured]) -> Measured:
    calls, *figures = (statistics.median(values) for values in zip(*map(astuple, rounds), strict=True))
    return Measured(int(calls), *figures)


class Engine:
    """The mock engine's process, called directly."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.url = f"http://127.0.0.1:{port}"

    def direct(self, tokens: int, *, stream: bool = False) -> Subject:
        asked = {**CHAT.opening(tokens), "return_token_ids": True, "logprobs": True}
        request = CHAT.request("none", asked, stream=stream)
        return Subject("direct", self.port, [self.pid], lambda _: request)


class Gateway:
    """A gateway's process and its sessions."""

    def __init__(self, said: str, pid: int) -> None:
        told = orjson.loads(said)
        self.port, self.keys, self.pid = told["port"], told["keys"], pid

    def first(self, wire: Wire, tokens: int, *, stream: bool = False, name: str = "first") -> Subject:
        body = wire.opening(tokens)
        return self._subject(name, [wire.request(key, body, stream=stream) for key in self.keys])

    def following(
        self, wire: Wire, tokens: int, *, turns: int = 1, stream: bool = False, sessions: int, name: str = "spliced"
    ) -> Subject:
        """Return requests that continue an answer. The turns before them are played here, in each session.

        `sessions`: the highest number of connections that will use the requests.
        """
        return self._subject(name, asyncio.run(self._played(wire, tokens, turns, stream, self.keys[:sessions])))

    async def _played(self, wire: Wire, tokens: int, turns: int, stream: bool, keys: Sequence[str]) -> list[bytes]:
        requests = []
        async with Caller(self.port) as caller:
            for key in keys:
                body = wire.opening(tokens)
                for turn in range(turns):
                    answer = await caller.json(wire.request(key, body))
                    body = wire.following(body, answer, text(RESULT_TOKENS, turn))
                requests.append(wire.request(key, body, stream=stream))
        return requests

    def afresh(self, wire: Wire, subject: Subject, *, sessions: int, name: str) -> Subject:
        """Return another subject's requests, in sessions without the earlier turns."""
        bodies = [orjson.loads(subject.request(number).partition(b"\r\n\r\n")[2]) for number in range(sessions)]
        keys = self.keys[-sessions:]
        return self._subject(name, [wire.request(key, body) for key, body in zip(keys, bodies, strict=True)])

    def prompt_tokens(self, subject: Subject) -> int:
        """Return the prompt tokens of a Chat Completions subject's first request."""
        return asyncio.run(self._usage(subject))["prompt_tokens"]

    async def _usage(self, subject: Subject) -> dict[str, int]:
        async with Caller(self.port) as caller:
            return (await caller.json(subject.request(0)))["usage"]

    def _subject(self, name: str, requests: Sequence[bytes]) -> Subject:
        return Subject(name, self.port, [self.pid], requests.__getitem__)


@contextmanager
def engine(*options: str) -> Iterator[Engine]:
    """Run the mock engine. Meanwhile this process runs on the client's core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {LOAD_CORES[-1]})
    try:
        with server("benchmarks.mock_engine", *options, core=LOAD_CORES[0]) as mock:
            yield Engine(int(mock.said), mock.pid)
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def floor(mock: Engine, tokens: int, name: str = "floor") -> Iterator[Subject]:
    """Run `benchmarks.floor` with the mock engine's answer to a prompt, as the name says."""
    direct, asks = mock.direct(tokens), ("--engine", mock.url)
    with tempfile.TemporaryDirectory(prefix="polar-gym-bench-") as state:
        answer = Path(state, "answer")
        answer.write_bytes(asyncio.run(_answer(direct)))
        more = {"floor": (), "floor, asking": asks, "floor, recording": (*asks, "--records")}[name]
        with server("benchmarks.floor", "--answer", str(answer), "--state", state, *more) as process:
            yield Subject(name, int(process.said), [process.pid], direct.request)


async def _answer(subject: Subject) -> bytes:
    async with Caller(subject.port) as caller:
        return await caller.ask(subject.request(0))


@contextmanager
def gateway(engine_url: str, *options: str, sessions: int = 256, root: Path = ROOT) -> Iterator[Gateway]:
    """Run the gateway of a checkout."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-bench-") as state:
        arguments = ("--engine", engine_url, "--state", state, "--sessions", str(sessions), *options)
        with server("benchmarks.gateway_process", *arguments, root=root) as process:
            yield Gateway(process.said, process.pid)
