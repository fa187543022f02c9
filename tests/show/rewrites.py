"""Show which answers each harness hands back in another form than they were sampled: `make show-rewrites`.

Each real harness runs on a bundled task in a real sandbox against the real gateway, whose engine's answers are hard to
hand back (`hard_answers`). The program compares the answers that come back with the sampled ones. The session's
fidelity says which continuations were still spliced, and how many traces the session makes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.gateway.node.assemble import load_tasks, make_request
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses import HARNESSES
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode
from tests.e2e.hard_answers import ANSWERS, HardEngine, rewrites
from tests.show.result import HARNESSES as NAMES
from tests.show.result import Result, make_parser, parse

ONE_TRACE, EXACT = LAWS = ("every session has one main trace", "every session's token counts are exact")

COLUMNS = ("harness", "handed back in another form", "as sampled", "continuations", "traces")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A session and what its harness rewrote."""

    harness: str
    episode: Episode
    rewritten: dict[str, list[str]]
    """See `hard_answers.rewrites`."""

    @property
    def main_traces(self) -> int:
        return self.episode.trajectory.fidelity.traces_by_kind.get("main", 0)

    def row(self) -> list[str]:
        fidelity = self.episode.trajectory.fidelity
        causes = Counter(broken.cause for broken in fidelity.breaks)
        broken = ", ".join(f"{count} broken ({cause})" for cause, count in causes.items()) or "0 broken"
        kept = [name for name, changes in self.rewritten.items() if not changes]
        missing = [f"{name}: never came back" for name in ANSWERS if name not in self.rewritten]
        return [
            self.harness,
            "\n".join([*self._changes(), *missing]) or "nothing",
            "\n".join(kept),
            f"{fidelity.spliced} spliced\n{fidelity.canonical} templated again\n{broken}",
            "\n".join(f"{count} {kind}" for kind, count in fidelity.traces_by_kind.items()),
        ]

    def _changes(self) -> list[str]:
        answers: dict[str, list[str]] = {}
        for name, changes in self.rewritten.items():
            for change in changes:
                answers.setdefault(change, []).append(name)
        everywhere = len(self.rewritten)
        return [
            f"{change}: {'every time' if len(names) == everywhere else ', '.join(names)}"
            for change, names in answers.items()
        ]


async def run(harness: str, profile: str = "default") -> Shown:
    """Run one session of a harness that is given hard answers."""
    config = load_config(settings={"harness": {"name": harness, "profile": profile}, "runtime": "bubblewrap"})
    request = make_request(config, load_tasks(config)[0])
    engine = HardEngine(HARNESSES.get(harness).ends_by)
    with tempfile.TemporaryDirectory(prefix="polar-gym-rewrites-") as state:
        async with Node(engine, cache=cache_dir(), state=Path(state)) as node:
            episode = await node.rollout(request)
    return Shown(harness=harness, episode=episode, rewritten=rewrites(engine))


def show(found: Sequence[Shown]) -> Table:
    table = Table(*COLUMNS, title="What each harness rewrites, and what became of it", show_lines=True)
    for each in found:
        table.add_row(*each.row())
    return table


def markdown(found: Sequence[Shown]) -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(each.row() for each in found)]
    return "".join(f"| {' | '.join(row)} |\n" for row in ([cell.replace("\n", "<br>") for cell in row] for row in rows))


def check(found: Sequence[Shown], result: Result) -> None:
    """Hold each session against the laws."""
    for each in found:
        fidelity = each.episode.trajectory.fidelity
        result.check(ONE_TRACE, [f"{each.harness}: {fidelity.traces_by_kind}"] * (each.main_traces != 1))
        result.check(EXACT, [f"{each.harness}: {fidelity!r}"] * (not fidelity.exact))
        result.figures[each.harness] = {
            "rewritten": each.rewritten,
            "spliced": fidelity.spliced,
            "canonical": fidelity.canonical,
            "broken": len(fidelity.breaks),
            "traces": fidelity.traces_by_kind,
        }


def main() -> int:
    parser = make_parser("rewrites", __doc__, quick="all harnesses except pi and codex")
    parser.add_argument("--harness", action="append", choices=NAMES, help="only this one; may be given repeatedly")
    parser.add_argument("--profile", choices=["default", "lean"], default="default")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.set_defaults(harness=NAMES)
    options = parse(parser, quick={"harness": ["pi", "codex"]})
    result = Result("rewrites", LAWS, options)
    found = [asyncio.run(run(harness, options.profile)) for harness in options.harness]
    check(found, result)
    make_console().print(show(found))
    if options.markdown:
        options.markdown.write_text(markdown(found), encoding="utf-8")
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
