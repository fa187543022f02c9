"""The law between trained logprobs and a forward pass of the same model (`forward`, in another interpreter)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.exactness.books import Books, Trace

SCORED = "a forward pass of the model gives each trained token its logprob"
BOUND = 5e-4
"""Of a difference between the two, in nats: float32 on both sides, other kernels."""


@dataclass(slots=True)
class Scores:
    """How far the books are from the forward passes."""

    tokens: int = 0
    largest: float = 0.0
    total: float = 0.0
    breaches: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.tokens)


def score(sessions: Sequence[Books], python: Path, model: Path) -> Scores:
    """Return the differences of all trained tokens."""
    traces = [trace for books in sessions for trace in books.traces if any(trace.mask)]
    lines = [json.dumps({"ids": trace.prompt + trace.ids, "places": _places(trace)}) for trace in traces]
    command = [str(python), str(Path(__file__).with_name("forward.py")), str(model)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    found = Scores()
    for trace, line in zip(traces, done.stdout.splitlines(), strict=True):
        told = [value for value, mask in zip(trace.logprobs, trace.mask, strict=True) if mask]
        off = [abs(one - other) for one, other in zip(told, json.loads(line), strict=True)]
        found.tokens += len(off)
        found.largest = max(found.largest, *off)
        found.total += sum(off)
        beyond = sum(not value <= BOUND for value in off)
        if beyond:
            found.breaches.append(f"trace {trace.trace_id}: {beyond} of {len(off)} tokens, up to {max(off):.2g} nats")
    return found


def _places(trace: Trace) -> list[int]:
    return [len(trace.prompt) + place for place, mask in enumerate(trace.mask) if mask]
