"""What each harness hands back in another form than it was sampled, and what became of it: `make show-rewrites`.

Each real harness runs on a bundled task in a real sandbox against the real gateway, whose engine's answers are hard to
hand back (`hard_answers`). What comes back is compared with what was sampled; the session's own fidelity says which
continuations were spliced all the same, and how many traces it makes. More than one main trace is an error.
"""

from __future__ import annotations

import argparse
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
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode
from tests.e2e.hard_answers import ANSWERS, HardEngine, rewrites

HARNESSES = ["codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "pi"]

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
        balance = self.episode.trajectory.fidelity
        causes = Counter(broken.cause for broken in balance.breaks)
        broken = ", ".join(f"{count} broken ({cause})" for cause, count in causes.items()) or "0 broken"
        kept = [name for name, changes in self.rewritten.items() if not changes]
        missing = [f"{name}: never came back" for name in ANSWERS if name not in self.rewritten]
        return [
            self.harness,
            "\n".join([*self._changes(), *missing]) or "nothing",
            "\n".join(kept),
            f"{balance.spliced} spliced\n{balance.canonical} templated anew\n{broken}",
            "\n".join(f"{count} {kind}" for kind, count in balance.traces_by_kind.items()),
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
    """One session of a harness that is given hard answers."""
    config = load_config(settings={"harness": {"name": harness, "profile": profile}, "runtime": "bubblewrap"})
    request = make_request(config, load_tasks(config)[0])
    engine = HardEngine()
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


async def main() -> None:
    parser = argparse.ArgumentParser(prog="make show-rewrites", description=__doc__)
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; may be given repeatedly")
    parser.add_argument("--profile", choices=["default", "lean"], default="default")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    found = [await run(harness, options.profile) for harness in options.harness or HARNESSES]
    make_console().print(show(found))
    if options.markdown:
        options.markdown.write_text(markdown(found), encoding="utf-8")
    if split := [each.harness for each in found if each.main_traces != 1]:
        sys.exit(f"not one main trace: {', '.join(split)}")


if __name__ == "__main__":
    asyncio.run(main())
