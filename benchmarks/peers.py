"""Measures other gateways under the same load, in the same run: `make bench-peers`, then `python -m benchmarks peers`.

The peers are installed from PyPI, each in a separate virtual environment under `~/.cache/polar-gym/peers`. miles is in
no registry: `MILES_PYTHON` names a Python that has miles and SGLang. A peer that does not install or run is named.
Every connection leads conversations of six turns, whose prompts grow from 7k tokens to 9k. Each turn is answered with
340 tokens. *Token-in* means that the next turn is conditioned on the ids already sampled; the other gateways pass text
on. Each gateway has one core. The client and the mock engine have the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import Caller, Measured, cpu_seconds
from benchmarks.mock_engine import PIECE
from benchmarks.processes import LOAD_CORES, ROOT, running, server
from benchmarks.proxy import Engine, engine, gateway
from benchmarks.report import Figure, Goal, Section, Table
from benchmarks.wires import CHAT, text

CACHE = Path.home() / ".cache" / "polar-gym" / "peers"
EMBEDDED = ROOT / "polar_gym" / "engines" / "embedded"
_EMBEDDED_FILES = (
    *("--tokenizer", str(EMBEDDED / "tokenizer.json")),
    *("--template", str(EMBEDDED / "chat_template.jinja")),
)
TURNS = 6
OPENING = 7000
ADDED = 60
"""Prompt tokens of the first turn, and tokens that each later turn adds beside the answer."""
START_SECONDS = 120.0
MOST_SESSIONS = 20_000
VERIFIERS = ("verifiers==0.4.0",)
REFERENCE_TEXT = "I look at the file and then I run the tests again. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    requirements: tuple[str, ...]
    token_in: bool
    command: Callable[[Path, int, str, Path], list[str]]
    """(the peer's Python, port, the engine's URL, a scratch folder) -> the command that starts the peer."""
    path: str = "/v1/chat/completions"
    """`{session}` is the conversation's session."""
    own_ids: bool = False
    """The peer tokenises, with the tokenizer of the benchmark, and asks the engine for ids."""
    named_by: str = ""
    """The environment variable that names the Python of a peer that no registry has."""

    @property
    def environment(self) -> Path:
        """Return the directory of the virtual environment, which peers of one package share."""
        return CACHE / re.split(r"[\[=]", self.requirements[0])[0]

    @property
    def python(self) -> Path | None:
        """Return the peer's Python; None: the peer is not installed."""
        found = Path(os.environ.get(self.named_by, "")) if self.named_by else self.environment / "bin" / "python"
        return found if found.is_file() else None


def _litellm(python: Path, port: int, url: str, folder: Path) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: policy\n    litellm_params:\n      model: hosted_vllm/policy\n"
        f"      api_base: {url}/v1\n      api_key: none\n"
    )
    return [str(python.with_name("litellm")), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]


def _rllm(python: Path, port: int, url: str, folder: Path) -> list[str]:
    return [
        *(str(python.with_name("rllm-model-gateway")), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker", url, "--store", "memory", "--log-level", "WARNING"),
    ]


def _agentcore(python: Path, port: int, url: str, folder: Path) -> list[str]:
    return [
        *(str(python), str(ROOT / "benchmarks" / "peer_agentcore.py"), "--engine", url, "--port", str(port)),
        *_EMBEDDED_FILES,
        *("--sessions", str(MOST_SESSIONS)),
    ]


def _agentlightning(python: Path, port: int, url: str, folder: Path) -> list[str]:
    script = ROOT / "benchmarks" / "peer_agentlightning.py"
    return [str(python), str(script), "--engine", url, "--port", str(port)]


def _verifiers(python: Path, port: int, url: str, folder: Path) -> list[str]:
    script = ROOT / "benchmarks" / "peer_verifiers.py"
    return [str(python), str(script), "--engine", url, "--port", str(port), "--sessions", str(MOST_SESSIONS)]


def _miles(python: Path, port: int, url: str, folder: Path) -> list[str]:
    script = ROOT / "benchmarks" / "peer_miles.py"
    return [*(str(python), str(script), "--engine", url, "--port", str(port)), *_EMBEDDED_FILES]


def _verifiers_training(python: Path, port: int, url: str, folder: Path) -> list[str]:
    return [*_verifiers(python, port, url, folder), *_EMBEDDED_FILES]


PEERS = (
    Peer(name="litellm", requirements=("litellm[proxy]==1.100.0",), token_in=False, command=_litellm),
    Peer(
        name="rllm-model-gateway",
        requirements=("rllm-model-gateway==0.1.0",),
        token_in=False,
        command=_rllm,
        path="/sessions/{session}/v1/chat/completions",
    ),
    Peer(
        name="agentcore-rl-toolkit",
        requirements=("agentcore-rl-toolkit[gateway]==0.2.0",),
        token_in=True,
        command=_agentcore,
        own_ids=True,
    ),
    Peer(
        name="agentlightning",
        requirements=("agentlightning==0.3.0",),  # later versions have no proxy
        token_in=False,
        command=_agentlightning,
        path="/rollout/{session}/v1/chat/completions",
    ),
    Peer(name="verifiers, relay", requirements=VERIFIERS, token_in=False, command=_verifiers),
    Peer(name="verifiers, training", requirements=VERIFIERS, token_in=True, command=_verifiers_training, own_ids=True),
    Peer(
        name="miles",
        requirements=(),
        token_in=True,
        command=_miles,
        path="/sessions/{session}/v1/chat/completions",
        own_ids=True,
        named_by="MILES_PYTHON",
    ),
)
SESSION = re.compile(rb"^session: (\S+)$", re.MULTILINE)
"""Matches the line in which a peer that names sessions itself prints the name."""


def install() -> None:
    """Prepare the environments that are missing."""
    for peer in {each.environment: each for each in PEERS if each.requirements}.values():
        if peer.python is None:
            subprocess.run([sys.executable, "-m", "venv", str(peer.environment)], check=True)
        done = subprocess.run([str(peer.python), "-m", "pip", "install", "-q", *peer.requirements], check=False)
        print(f"{peer.environment.name}: {'installed' if done.returncode == 0 else 'did not install'}")


# The load -------------------------------------------------------------------------------------------------------------


@dataclass
class Conversations:
    """The clients' requests: always new conversations, which differ in their second user message."""

    path: str
    key: Callable[[int, int], str]
    """(connection, conversation) -> API key, which names the session."""
    words: Sequence[str] = ()
    """Words that the gateway's own tokenizer takes for one token, as long as a piece of text; empty: the mock engine
    counts."""
    taken: list[float] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def opening(self, number: int) -> dict[str, Any]:
        messages = [m for m in CHAT.opening(OPENING)["messages"] if m["role"] in ("system", "user")]
        messages.append({"role": "user", "content": text(OPENING // 2, 3)})
        said = [{**message, "content": self._tokens(message["content"])} for message in messages]
        return {"model": "policy", "messages": [*said, {"role": "user", "content": f"This is {number}."}]}

    def _tokens(self, pieces: str) -> str:
        """Return a text with as many tokens for the gateway as a text of pieces has for the mock engine."""
        if not self.words:
            return pieces
        return "".join(self.words[int(piece) % len(self.words)] for piece in pieces.split())

    def request(self, key: str, body: dict[str, Any]) -> bytes:
        path = self.path.format(session=key)
        return CHAT.request(key, body).replace(CHAT.path.encode(), path.encode(), 1)

    async def keep_talking(self, port: int, connection: int, until: float) -> None:
        async with Caller(port) as caller:
            while time.perf_counter() < until:
                number = next(self.numbers)
                key, body = self.key(connection, number), self.opening(number)
                for turn in range(TURNS):
                    began = time.perf_counter()
                    answer = await caller.json(self.request(key, body))
                    self.taken.append(time.perf_counter() - began)
                    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
                    asked = {"role": "user", "content": self._tokens(text(ADDED, turn))}
                    body = {**body, "messages": [*body["messages"], said, asked]}
                    if time.perf_counter() >= until:
                        break


async def talk(port: int, pids: list[int], said: Conversations, connections: int, seconds: float) -> Measured:
    said.taken.clear()
    started, began = time.perf_counter(), sum(map(cpu_seconds, pids))
    async with asyncio.TaskGroup() as group:
        for connection in range(connections):
            group.create_task(said.keep_talking(port, connection, started + seconds))
    cpu, passed = sum(map(cpu_seconds, pids)) - began, time.perf_counter() - started
    p50, p99 = np.percentile(said.taken, [50, 99]) * 1e3
    calls = len(said.taken)
    return Measured(calls, float(p50), float(p99), calls / passed, cpu / calls * 1e3)


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    token_in: bool | None
    port: int
    leader: int
    said: Conversations

    @property
    def pids(self) -> list[int]:
        """Return all processes of the server's process group."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                after_name = stat.read_text().rpartition(")")[2].split()
            except OSError:  # the process ended meanwhile
                continue
            if int(after_name[2]) == self.leader:
                found.append(int(stat.parent.name))
        return found


# The run --------------------------------------------------------------------------------------------------------------


def measure(quick: bool) -> Section:
    rounds, seconds = (1, 1.0) if quick else (5, 3.0)
    missing: list[str] = []
    section = Section(title="Peers", text=(__doc__ or "").partition("\n\n")[2].strip())
    with ExitStack() as stack:
        mock = stack.enter_context(engine())
        subjects = [_direct(mock), stack.enter_context(_ours(mock))]
        for peer in PEERS:
            if (python := peer.python) is None:
                missing.append(f"{peer.name}: not installed ({peer.named_by or 'make bench-peers'})")
                continue
            try:
                subjects.append(stack.enter_context(_started(peer, python, mock)))
            except RuntimeError as error:
                missing.append(f"{peer.name}: {error}")
        rows, least = _compare(subjects, rounds, seconds)
    columns = (
        "gateway",
        "token-in",
        "c",
        "p50 ms",
        "x direct",
        "p99 ms",
        "req/s",
        "CPU ms per call",
        "x the CPU of polar-gym (least, most)",
        "polar-gym: x req/s",
    )
    section.tables.append(Table(columns=columns, rows=rows, caption=f"Not measured: {'; '.join(missing) or 'none'}."))
    found = f"{min(least):.1f} times in the worst round of {2 * rounds}" if least else ""
    measured = {subject.name for subject in subjects}
    unknown = [peer.name for peer in PEERS if peer.token_in and peer.requirements and peer.name not in measured]
    section.goals.append(
        Goal(
            claim="peers: 5 times less CPU per call than each peer with token-in/token-out, in every round",
            measured="; ".join(filter(None, (found, *(f"{name} was not measured" for name in unknown)))),
            held=not unknown and min(least) >= 5,
        )
    )
    return section


def _compare(subjects: list[Subject], rounds: int, seconds: float) -> tuple[list[tuple[Figure, ...]], list[float]]:
    """Return the rows, and the CPU of token-in peers in each round, divided by that of polar-gym in the same round."""
    rows: list[tuple[Figure, ...]] = []
    least: list[float] = []
    for connections in (1, 32):
        found: dict[str, list[Measured]] = {subject.name: [] for subject in subjects}
        for _ in range(rounds):
            for each in subjects:
                found[each.name].append(asyncio.run(talk(each.port, each.pids, each.said, connections, seconds)))
        medians = {name: _median(every) for name, every in found.items()}
        direct, ours = medians["direct"], medians["polar-gym"]
        for each in subjects:
            its = medians[each.name]
            ratios = [a.cpu_ms / b.cpu_ms for a, b in zip(found[each.name], found["polar-gym"], strict=True)]
            if each.token_in and each.name != "polar-gym":
                least += ratios
            token_in = "-" if each.token_in is None else "yes" if each.token_in else "no"
            speed = (its.p50_ms, its.p50_ms / direct.p50_ms, its.p99_ms, its.per_second)
            cpu = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
            rows.append((each.name, token_in, connections, *speed, its.cpu_ms, cpu, ours.per_second / its.per_second))
    return rows, least


def _median(rounds: list[Measured]) -> Measured:
    calls, *figures = (statistics.median(values) for values in zip(*map(astuple, rounds), strict=True))
    return Measured(int(calls), *figures)


def _direct(mock: Engine) -> Subject:
    return Subject("direct", None, mock.port, mock.pid, Conversations(CHAT.path, lambda *_: "none"))


@contextmanager
def _ours(mock: Engine) -> Iterator[Subject]:
    with gateway(mock.url, sessions=32) as own:
        said = Conversations(CHAT.path, lambda connection, _: own.keys[connection])
        yield Subject("polar-gym", True, own.port, own.pid, said)


@contextmanager
def _started(peer: Peer, python: Path, mock: Engine) -> Iterator[Subject]:
    """Run a peer. Raises `RuntimeError` with the end of the peer's output."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-gym-peer-")))
        url, words = mock.url, list[str]()
        if peer.own_ids:
            ids, answer, words = _embedded_answer()
            own = server("benchmarks.mock_engine", "--ids", ids, "--text", answer, core=LOAD_CORES[0])
            url = f"http://127.0.0.1:{stack.enter_context(own).said}"
        port = _free_port()
        log = stack.enter_context((folder / "log").open("w+b"))
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        command = peer.command(python, port, url, folder)
        process = stack.enter_context(running(command, log=log.fileno(), environment=environment))
        said = Conversations(peer.path, lambda _, conversation: f"s{conversation % MOST_SESSIONS}", words)
        until = time.monotonic() + START_SECONDS
        while (problem := asyncio.run(_problem(port, said))) is not None:
            if process.poll() is not None or time.monotonic() > until:
                log.seek(0)
                raise RuntimeError(f"did not run: {problem}; {log.read()[-500:].decode(errors='replace')}")
            time.sleep(0.5)
            if named := SESSION.search((folder / "log").read_bytes()):
                name = named[1].decode()
                said.key = lambda *_, name=name: name
        yield Subject(peer.name, peer.token_in, port, process.pid, said)


async def _problem(port: int, said: Conversations) -> str | None:
    """Return why the server does not answer yet; None: it answers."""
    number = next(said.numbers)
    key = said.key(0, number)
    try:
        async with Caller(port) as caller:
            await caller.ask(said.request(key, said.opening(number)))
    except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return None


def _embedded_answer() -> tuple[str, str, list[str]]:
    """Return an answer in ids of the embedded tokenizer, its text, and the tokenizer's words that are as long as a
    piece."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    ids = tokenizer.encode(REFERENCE_TEXT * 60).ids[:339]
    words = [tokenizer.decode([each]) for each in range(tokenizer.get_vocab_size())]
    alone = [each for each in words if len(each) == PIECE and re.fullmatch(" [a-z]+", each)]
    return ",".join(map(str, [*ids, end])), tokenizer.decode(ids), alone


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    install()
