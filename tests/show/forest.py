"""Count the tokens that a prefix forest saves on groups of real sessions: `make show-forest`.

Each harness runs a group of sessions on one task, in real sandboxes, with a scripted policy whose samples differ by a
few words. The rows of a group are made by both builders. A ratio says how many times more tokens the flat rows have
than the forest of the group. The figures say how much the harnesses repeat, and nothing of what a model would sample:
long answers of a model make all ratios smaller.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.builders import build_trajectory
from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import BuilderSpec, Episode
from polar_gym.training import Batch, make_batch
from polar_gym.training.forest import Forest, forest, packed
from tests.show.result import OF_NPM, Result, make_parser, parse

ROWS, ONE, NAMED = LAWS = (
    "the forest gives every row back",
    "both builders train the same tokens, in the same forest",
    "every session has the traces that its case is named after",
)
BUILDERS = ("per_request", "prefix_merging")
TURNS = 8
BRANCH_AT = 4
SCRIPT = {"match": "", "commands": [f"seq {turn} {turn + 100}" for turn in range(TURNS)], "final_message": "Done."}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of sessions."""

    engine: str
    """The class in `tests.e2e.branching_engine`."""
    branch_at: int = 0
    """The first turn in which the samples of a group differ."""
    profile: str = "default"
    traces: int = 1
    """The traces of a session: at least so many."""
    without: Mapping[str, str]
    """The harnesses that have no such sessions, with the reason."""


CASES = {
    "main only": Case(engine="Branching", without={}),
    "sub-agents": Case(engine="Delegating", traces=2, without={"pi": "has no sub-agents"}),
    "compaction": Case(
        engine="Compacting",
        profile="lean",
        traces=3,
        without={"gemini_cli": "never compacts: it takes its context for a million tokens"},
    ),
    "branched groups": Case(engine="Branching", branch_at=BRANCH_AT, without={}),
}


@dataclass(frozen=True)
class Counted:
    """The rows and the forest of a group, by each builder."""

    batches: Mapping[str, Batch]
    forests: Mapping[str, Forest]

    def figures(self) -> dict[str, Any]:
        return {
            "rows": {name: len(found.rows) for name, found in self.forests.items()},
            "flat_tokens": {name: found.flat_tokens for name, found in self.forests.items()},
            "forest_tokens": {name: found.tokens for name, found in self.forests.items()},
            "trained_tokens": {name: batch.counts.tokens for name, batch in self.batches.items()},
            "ratio": {name: round(found.saving, 2) for name, found in self.forests.items()},
        }


async def group(harness: str, case: Case, samples: int) -> list[dict[str, Episode]]:
    """Return the sessions of a group, each with the traces of both builders."""
    return await asyncio.gather(*(session(harness, case, sample) for sample in range(samples)))


async def session(harness: str, case: Case, sample: int) -> dict[str, Episode]:
    with tempfile.TemporaryDirectory(prefix="polar-gym-forest-") as state:
        engine = {"name": f"tests.e2e.branching_engine:{case.engine}", "sample": sample, "branch_at": case.branch_at}
        settings = {
            "harness": {"name": harness, "profile": case.profile},
            "engine": engine | {"scripts": [SCRIPT]},
            "runtime": "bubblewrap",
            "evaluator": "session_completion",
            "rollout": {"state": state, "timeout_seconds": 600},
        }
        config = load_config(settings=settings)
        task = load_tasks(config)[0]
        async with make_node(config, [task]) as node:
            episode = await node.rollout(make_request(config, task))
        calls = read_journal(Path(str(episode.artifacts.journal)))
    return {
        name: episode.model_copy(update={"trajectory": build_trajectory(calls, BuilderSpec(name=name))})
        for name in BUILDERS
    }


def count(sessions: Sequence[Mapping[str, Episode]]) -> Counted:
    batches = {name: make_batch([built[name] for built in sessions], allow_scripted=True) for name in BUILDERS}
    return Counted(batches, {name: forest(batch.rows) for name, batch in batches.items()})


def breaches(case: Case, sessions: Sequence[Mapping[str, Episode]], counted: Counted) -> dict[str, list[str]]:
    """Return what breaks each law."""
    figures = counted.figures()
    kinds = [Counter(trace.kind for trace in built["prefix_merging"].trajectory.traces) for built in sessions]
    return {
        ROWS: [f"{name}: a row is not in the forest" for name in BUILDERS if not gives_back(counted.forests[name])],
        ONE: [
            f"{figure}: {figures[figure]}"
            for figure in ("forest_tokens", "trained_tokens")
            if len(set(figures[figure].values())) > 1
        ],
        NAMED: [f"{dict(found)}" for found in kinds if found.total() < case.traces],
    }


def gives_back(found: Forest) -> bool:
    """Return whether the packed forest has every row at its places."""
    tree = packed(found)
    lines = zip(found.rows, tree["places"], strict=True)
    return all((tree["input_ids"][places[: len(row.token_ids)]] == row.token_ids).all() for row, places in lines)


async def show(options: Any, result: Result) -> Table:
    """Run every case of every harness, one after the other."""
    title = (
        f"Flat tokens / forest tokens of a group of {options.samples}: per_request, prefix_merging (scripted policy)"
    )
    table = Table("harness", *CASES, title=title)
    for harness in options.harness:
        cells = []
        for name, case in CASES.items():
            if harness in case.without:
                result.figures[f"{harness}, {name}"] = case.without[harness]
                cells.append(f"- {case.without[harness]}")
                continue
            sessions = await group(harness, case, options.samples)
            counted = count(sessions)
            figures = result.figures[f"{harness}, {name}"] = counted.figures()
            for law, found in breaches(case, sessions, counted).items():
                result.check(law, [f"{harness}, {name}: {breach}" for breach in found])
            cells.append("{per_request:.1f}x, {prefix_merging:.1f}x".format(**figures["ratio"]))
        table.add_row(harness, *cells)
    return table


def main() -> int:
    parser = make_parser("forest", __doc__, quick="all harnesses except pi and codex, and all sessions but two of each")
    parser.add_argument("--harness", action="append", choices=OF_NPM, help="only this one; may be given repeatedly")
    parser.add_argument("--samples", type=int, default=4, help="sessions of a group (default: %(default)s)")
    parser.set_defaults(harness=OF_NPM)
    options = parse(parser, quick={"harness": ["pi", "codex"], "samples": 2})
    result = Result("forest", LAWS, options)
    make_console().print(asyncio.run(show(options, result)))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
