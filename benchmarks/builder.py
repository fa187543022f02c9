"""Builder speed against a plain copy of the same arrays: `python -m benchmarks builder`.

The CPU time of `build_trajectory` with `prefix_merging` (tree, traces, exclusions, fidelity) is measured over the
sampled and conditioned tokens of all calls, beside copying those arrays once. The exponent of time over tokens (1.0 is
linear) is fitted over sessions from small to very large. These sessions take turns, so that no processor cache still
holds the arrays of one of them. Chains are one conversation that grows. Forks are one conversation whose every turn is
asked again and again. Agents are sessions of up to 2,000 calls, in many conversations of 20 turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.report import Goal, Plot, Section, Table
from polar_gym.builders import build_trajectory
from polar_gym.schema import BuilderSpec, ModelCall

TURN, ADDED = 200, 300
"""Tokens sampled per turn, and added by the harness between turns."""
ROOT = 4000
"""Tokens of a first prompt."""
BRANCHES = 5
AGENT_TURNS = 20
"""Answers to each turn of a session with forks."""


def chain(turns: int, *, first_index: int = 0, seed: int = 0) -> list[ModelCall]:
    """Make a conversation that continues itself token for token."""
    random = np.random.default_rng(seed)
    prompt, parent, calls = _ids(random, ROOT), None, []
    for turn in range(turns):
        call = _call(f"{seed}-{turn}", first_index + turn, prompt, _ids(random, TURN), parent)
        calls.append(call)
        prompt, parent = np.concatenate([prompt, call.response_ids, _ids(random, ADDED)]), call
    return calls


def forks(turns: int) -> list[ModelCall]:
    """Make a conversation in which each turn was answered several times, and the last answer went on."""
    random = np.random.default_rng(0)
    prompt, parent, calls = _ids(random, ROOT), None, []
    for turn in range(turns):
        for branch in range(BRANCHES):
            calls.append(_call(f"{turn}-{branch}", len(calls), prompt, _ids(random, TURN), parent))
        parent = calls[-1]
        prompt = np.concatenate([prompt, parent.response_ids, _ids(random, ADDED)])
    return calls


def agents(count: int) -> list[ModelCall]:
    """Make a session of many conversations."""
    turns = AGENT_TURNS
    return [call for agent in range(count) for call in chain(turns, first_index=turns * agent, seed=agent)]


def _ids(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, 150_000, count, dtype=np.int32)


def _call(name: str, index: int, prompt: np.ndarray, response: np.ndarray, parent: ModelCall | None) -> ModelCall:
    return ModelCall(
        call_id=name,
        session_id="benchmark",
        index=index,
        provider="openai_chat",
        model="policy",
        messages=[],
        prompt_ids=prompt,
        response_ids=response,
        logprobs=np.zeros(TURN, dtype=np.float32),
        parent_id=parent.call_id if parent else None,
        continuation="spliced" if parent else "root",
        started_at=float(index),
        duration=0.5,
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def least_seconds(sessions: Sequence[list[ModelCall]], rounds: int) -> list[tuple[float, float]]:
    """Return, for each session, the least time of a build and the least time of copying the session's prompts.

    Other work of the machine only adds time. The sessions take turns, so that this work affects all of them alike.
    """
    spec = BuilderSpec(name="prefix_merging")
    least = [(math.inf, math.inf)] * len(sessions)
    for _ in range(rounds):
        for place, calls in enumerate(sessions):
            built = cpu_seconds(lambda calls=calls: build_trajectory(calls, spec))
            copied = cpu_seconds(lambda calls=calls: [call.prompt_ids.copy() for call in calls])
            least[place] = (min(least[place][0], built), min(least[place][1], copied))
    return least


SHAPES: dict[str, tuple[Callable[[int], list[ModelCall]], tuple[int, ...]]] = {
    "chain": (chain, (60, 120, 250, 500, 700)),
    "forks": (forks, (20, 60, 120, 240, 480)),
    "agents": (agents, (10, 20, 40, 70, 100)),
}


def measure(quick: bool) -> Section:
    rows, curves, speeds, exponents = [], {}, [], {}
    for name, (make, sizes) in SHAPES.items():
        points = []
        sessions = [make(size) for size in sizes]
        for calls, (built, copied) in zip(sessions, least_seconds(sessions, 3 if quick else 15), strict=True):
            tokens = sum(len(call.prompt_ids) + len(call.response_ids) for call in calls)
            points.append((float(tokens), built, copied))
            speeds.append(tokens / built)
            rows.append((name, len(calls), tokens / 1e6, tokens / built / 1e6, built / copied))
        logs = np.log(np.asarray(points))
        exponents[name] = [float(slope) for slope in np.polyfit(logs[:, 0], logs[:, 1:], 1)[0]]
        curves[name] = [(tokens / 1e6, built * 1e3) for tokens, built, _ in points]
    slowest = min(speeds) / 1e6
    said = ", ".join(f"{name} {own:.2f} (a copy: {copied:.2f})" for name, (own, copied) in exponents.items())
    columns = ("session", "calls", "M tokens", "M tokens/s of CPU", "x a copy")
    return Section(
        title="Builder",
        text=(__doc__ or "").partition("\n\n")[2].strip(),
        tables=[Table(columns=columns, rows=rows)],
        goals=[
            Goal(
                claim="builder: at least 50 M tokens/s of one core",
                measured=f"{slowest:.0f} at least, {max(speeds) / 1e6:.0f} at most",
                held=slowest >= 50,
            ),
            Goal(
                claim="builder: exponent at most 1.05",
                measured=said,
                held=all(own <= 1.05 for own, _ in exponents.values()),
            ),
        ],
        plots=[Plot(name="builder", title="prefix_merging", x="M tokens", y="CPU ms", curves=curves, logarithmic=True)],
    )
