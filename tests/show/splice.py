"""Prove token-in/token-out on a real vLLM with many random sessions, with splicing and without: `make show-splice`.

The program runs the sessions twice and prints both runs side by side. The policy is a trained tiny model in fp32 that
samples at temperature 1: its JSON and its tokenisation drift as badly as any. `agent.Agent` knows the true tree of each
session. The captured calls are held against it (`true_tree`), and their traces against the engine
(`polar_gym.episodes.verify`).
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from rich.table import Table

from polar_gym.builders import build_trajectory
from polar_gym.console import make_console
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.episodes.verify import Verification, verify
from polar_gym.gateway.node.node import Node
from polar_gym.schema import (
    Artifacts,
    BuilderSpec,
    Episode,
    HarnessSpec,
    ModelCall,
    RuntimeSpec,
    Session,
    TaskRequest,
)
from tests.e2e.agent import Agent
from tests.e2e.true_tree import FORKS, branches, call_problems, requests_by_call, tips
from tests.e2e.vllm_server import VllmServer, run_server, trained_model, vllm_python
from tests.show.result import Result, make_parser, parse

(EXACT,) = LAWS = ("calls, traces and logprobs are those of the agents and the engine",)
CONCURRENCY = 16
BOUND = 1e-4
"""Of the difference between a captured and a recomputed logprob."""
REQUEST = TaskRequest(
    task_id="random", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi")
)

SEEN = (
    "answers with reasoning",
    "answers with a tool call",
    "answers with parallel tool calls",
    "answers with broken tool calls",
    "answers cut off",
)
BREAKS = ("off", "cut")


@dataclass(slots=True)
class Outcome:
    """The figures and violations of all sessions in one mode."""

    splice: bool
    sessions: int = 0
    calls: int = 0
    abandoned: int = 0
    rejected: int = 0
    continuations: int = 0
    spliced: int = 0
    canonical: int = 0
    """Templated anew, and the token prefix held all the same."""
    broken: Counter[str] = field(default_factory=Counter)
    not_spliced: Counter[str] = field(default_factory=Counter)
    """Continuations that were templated by the engine, by cause."""
    forks: Counter[str] = field(default_factory=Counter)
    """Requests that name known calls and continue none, by cause."""
    true_branches: int = 0
    """Answers that no answer goes on from, as the agents know it: the traces of an engine that could always splice."""
    traces: int = 0
    sampled: int = 0
    trainable: int = 0
    trace_tokens: int = 0
    cache_hits: float = 0
    cache_queries: float = 0
    seconds: float = 0
    differences: list[np.ndarray] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """What broke a law, a line each."""
    seen: Counter[str] = field(default_factory=Counter)
    """What the policy said and where it was cut, to show that the sessions are not trivial."""


async def run_sessions(server: VllmServer, count: int, *, splice: bool, state: Path, seed: int = 0) -> Outcome:
    """Run all sessions in one mode, and check them."""
    outcome = Outcome(splice=splice)
    engine = VllmEngine(VllmOptions(url=server.url))
    async with Node(engine, cache=state, state=state, splice=splice, streaming="real") as node:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            async with http.post(f"{server.url}/reset_prefix_cache") as response:
                response.raise_for_status()
            before, started = await _cache_counters(http, server), time.monotonic()
            places = asyncio.Semaphore(CONCURRENCY)
            done = await asyncio.gather(*(_session(node, http, places, seed + number) for number in range(count)))
            outcome.seconds = time.monotonic() - started
            after = await _cache_counters(http, server)
        outcome.cache_hits, outcome.cache_queries = (end - start for start, end in zip(before, after, strict=True))
        await asyncio.gather(*(_judge(outcome, engine, places, *session) for session in done))
    return outcome


async def _session(
    node: Node, http: aiohttp.ClientSession, places: asyncio.Semaphore, seed: int
) -> tuple[Agent, list[ModelCall], Session, Path]:
    async with places, node.session(REQUEST) as life:
        life.capture.running = True
        agent = Agent(node.url, life.capture.key, http, random.Random(seed))
        await agent.run()
        return agent, life.capture.calls, life.session, life.capture.journal.path


async def _cache_counters(http: aiohttp.ClientSession, server: VllmServer) -> tuple[float, float]:
    """Return (hits, queries) of vLLM's prefix cache so far, in tokens."""
    async with http.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return tuple(
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))
        for name in ("hits", "queries")
    )  # pyright: ignore[reportReturnType]


# The laws -------------------------------------------------------------------------------------------------------------


async def _judge(
    outcome: Outcome,
    engine: VllmEngine,
    places: asyncio.Semaphore,
    agent: Agent,
    calls: Sequence[ModelCall],
    session: Session,
    journal: Path,
) -> None:
    trajectory = build_trajectory(calls, BuilderSpec(name="prefix_merging"))  # raises where tokens are lost
    fidelity = trajectory.fidelity
    episode = Episode(
        session=session,
        request=REQUEST,
        engine=engine.info,
        trajectory=trajectory,
        reward=None,
        artifacts=Artifacts(journal=str(journal)),
    )
    asked = requests_by_call(agent.asked, calls)
    problems = []
    async with places:
        for call in calls:
            found = await call_problems(outcome.splice, engine, call, calls, asked)
            problems += [f"call {call.index}: {problem}" for problem in found]
        problems += _verified(outcome, await verify([episode], engine))
    if fidelity.traces != branches(calls):
        problems.append(f"{fidelity.traces} traces, not {branches(calls)}")
    if fidelity.trainable_tokens != sum(len(call.response_ids) for call in calls if call.outcome == "delivered"):
        problems.append(f"what was delivered is not what is trained: {fidelity}")
    outcome.violations += [f"session {session.session_id}: {problem}" for problem in problems]
    _count(outcome, agent, calls, episode)


def _verified(outcome: Outcome, verification: Verification) -> list[str]:
    """Return the problems that `polar-gym verify` finds."""
    problems = list(verification.broken)
    differences = np.concatenate([np.empty(0, np.float32), *verification.compared["free"]])
    outcome.differences.append(differences)
    if not (differences < BOUND).all():
        problems.append(f"{int((~(differences < BOUND)).sum())} tokens do not get their logprobs again")
    if verification.not_comparable or set(verification.compared) - {"free"}:
        problems.append("some tokens were sampled from another distribution than the model's own")
    return problems


# The table ------------------------------------------------------------------------------------------------------------


def _count(outcome: Outcome, agent: Agent, calls: Sequence[ModelCall], episode: Episode) -> None:
    fidelity, traces = episode.trajectory.fidelity, episode.trajectory.traces
    outcome.sessions += 1
    outcome.calls += fidelity.calls
    outcome.rejected += agent.rejected
    outcome.abandoned += sum(call.outcome == "abandoned" for call in calls)
    outcome.continuations += sum(call.parent_id is not None and len(call.prompt_ids) > 0 for call in calls)
    outcome.spliced += fidelity.spliced
    outcome.canonical += fidelity.canonical
    outcome.broken.update(each.cause for each in fidelity.breaks if each.parent_id is not None)
    outcome.not_spliced.update(str(call.splice_cause) for call in calls if call.continuation == "canonical")
    outcome.forks.update(each.cause for each in fidelity.breaks if each.parent_id is None)
    outcome.true_branches += tips(calls)
    outcome.traces += fidelity.traces
    outcome.sampled += fidelity.sampled_tokens
    outcome.trainable += fidelity.trainable_tokens
    outcome.trace_tokens += sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)
    for call in calls:
        message = call.response or {}
        outcome.seen["answers with reasoning"] += bool(message.get("reasoning"))
        outcome.seen["answers with a tool call"] += bool(message.get("tool_calls"))
        outcome.seen["answers with parallel tool calls"] += len(message.get("tool_calls") or ()) > 1
        outcome.seen["answers with broken tool calls"] += "<tool_call>" in (message.get("content") or "")
        outcome.seen["answers cut off"] += call.finish_reason == "length"


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the modes side by side."""
    shown = Table(title="the same agents on the same model", show_lines=False)
    shown.add_column("")
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        shown.add_column("splice on" if outcome.splice else "splice off", justify="right")
        for name, value in _rows(outcome):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        shown.add_row(name, *values)
    return shown


def _rows(outcome: Outcome) -> list[tuple[str, str]]:
    differences = np.concatenate([*outcome.differences, np.empty(0, np.float32)])
    worst = f"{differences.max():.2e}" if len(differences) else "-"
    mean = f"{differences.mean():.2e}" if len(differences) else "-"
    return [
        ("sessions", f"{outcome.sessions:,}"),
        ("model calls", f"{outcome.calls:,}"),
        *((f"  {name}", f"{outcome.seen[name]:,}") for name in SEEN),
        ("  hung up on", f"{outcome.abandoned:,}"),
        ("  rejected and asked again", f"{outcome.rejected:,}"),
        ("continuations", f"{outcome.continuations:,}"),
        ("  spliced", f"{outcome.spliced:,}"),
        ("  templated, prefix held", f"{outcome.canonical:,}"),
        ("  templated, prefix broken", f"{outcome.broken.total():,}"),
        *((f"    {cause}", f"{outcome.broken[cause]:,}") for cause in BREAKS),
        ("forks that continue no known call", f"{outcome.forks.total():,}"),
        *((f"    {cause}", f"{outcome.forks[cause]:,}") for cause in FORKS),
        ("branches of the true tree", f"{outcome.true_branches:,}"),
        ("traces", f"{outcome.traces:,}"),
        ("tokens sampled", f"{outcome.sampled:,}"),
        ("tokens trainable", f"{outcome.trainable:,}"),
        ("mean trace length", f"{outcome.trace_tokens / max(1, outcome.traces):,.0f}"),
        ("tokens in all traces", f"{outcome.trace_tokens:,}"),
        ("prefix cache hits", f"{outcome.cache_hits / max(1.0, outcome.cache_queries):.1%}"),
        ("logprob difference, mean", mean),
        ("logprob difference, max", worst),
        ("wall time", f"{outcome.seconds:.0f} s"),
        ("laws broken", f"{len(outcome.violations):,}"),
    ]


def main() -> int:
    parser = make_parser("splice", __doc__, quick="most sessions")
    parser.add_argument("sessions", type=int, nargs="?", help="in each of the two runs (default 200)")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    options = parse(parser)
    count = options.sessions or (10 if options.quick else 200)
    python = vllm_python()
    if python is None:
        sys.exit("vLLM is missing; install it with: python -m tests.e2e.vllm_server install")
    result, console = Result("splice", LAWS, options), make_console()
    with tempfile.TemporaryDirectory() as name, run_server(python, Path(name), trained_model(python)) as server:
        outcomes = []
        for splice in (True, False):
            mode = f"splice {'on' if splice else 'off'}"
            console.print(f"{count} sessions, {mode} ...")
            state = Path(name, f"splice-{splice}")
            outcome = asyncio.run(run_sessions(server, count, splice=splice, state=state, seed=options.seed))
            outcomes.append(outcome)
            result.check(EXACT, [f"{mode}: {violation}" for violation in outcome.violations])
            result.figures[mode] = {name.strip(): value for name, value in _rows(outcome)}
    console.print(table(outcomes))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
