"""What each harness does when the engine fails, as a table: `make show-errors`.

Every cell is a run of a real harness in a real sandbox against the real gateway, whose engine fails once the session is
on its way (`faulty_engine`): twice and then no more, or with `--times 0` for good. A run that goes on asking is cut off
at `--limit` seconds, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from rich.progress import Progress
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy import proxy
from polar_gym.paths import cache_dir
from polar_gym.providers import Provider, routes
from polar_gym.schema import Episode, HarnessSpec, RuntimeSpec, TaskRequest
from tests.wire.faulty_engine import FAULTS, FINAL, Asked, FaultyEngine

HARNESSES = ["codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "pi"]

_NAMES = re.compile(rb'"(?:type|code|status)":"([\w.]+)"')
"""What a client may decide by."""

COLUMNS = ("case", "harness", "requests", "sent", "reaction", "end", "exit", "judged as")


@dataclass
class Observed:
    """What left the gateway that was not an answer."""

    refusals: list[str] = field(default_factory=list)

    def provider(self, provider: Provider) -> Provider:
        """The provider, overheard."""

        def error(status: int, kind: str, message: str) -> dict[str, Any]:
            body = provider.error(status, kind, message)
            self.refusals.append(f"{status} {_names(orjson.dumps(body))}")
            return body

        def error_event(kind: str, message: str) -> bytes:
            event = provider.error_event(kind, message)
            self.refusals.append(f"200, then {_names(event)}")
            return event

        return replace(provider, error=error, error_event=error_event)


def _names(data: bytes) -> str:
    return " ".join(dict.fromkeys(name.decode() for name in _NAMES.findall(data) if name not in (b"error", b"null")))


async def run(harness: str, case: str, options: argparse.Namespace) -> dict[str, str]:
    """One row of the table."""
    fault = FAULTS[case]
    times = 1 if fault.once and options.times else options.times or None
    engine = FaultyEngine(fault, times=times, slow_seconds=options.slow)
    observed = Observed()
    request = TaskRequest(
        task_id="show-errors",
        instruction="Do what the script says.",
        timeout_seconds=options.limit + (options.slow if fault.slow else 0),
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec(name=harness, profile="lean"),
    )
    with tempfile.TemporaryDirectory(prefix="polar-gym-errors-") as state:
        streaming: proxy.Streaming = "real" if fault.after_headers else "synthetic"
        async with Node(engine, cache=cache_dir(), state=Path(state), streaming=streaming) as node:
            node.proxy.providers = [observed.provider(provider) for provider in node.proxy.providers]
            node.proxy._routes = routes(node.proxy.providers)
            episode = await node.rollout(request)
    return {
        "case": case,
        "harness": harness,
        "requests": str(len(engine.asked)),
        "sent": ", ".join(dict.fromkeys(observed.refusals)) or ("200, then its end" if fault.error else "200"),
        "reaction": reaction(engine.asked, cut=episode.truncated),
        "end": end(episode),
        "exit": "-" if episode.session.exit_code is None else str(episode.session.exit_code),
        "judged as": judgement(episode),
    }


def reaction(asked: Sequence[Asked], *, cut: bool) -> str:
    """What came after each fault. The first request of a run cannot be one."""
    did: dict[str, list[str]] = {}
    for one, following in pairwise(asked):
        if one.became != "fault":
            continue
        did.setdefault(_step(one, following), []).append(f"{following.at - one.at:.1f}")
    if asked and asked[-1].became == "fault" and not cut:
        did.setdefault("stopped", [])
    return "; ".join(f"{what} after {_some(waits)} s" if waits else what for what, waits in did.items()) or "no fault"


def _step(one: Asked, following: Asked) -> str:
    if following.became == "summary":
        return "compacted"
    same = following.messages == one.messages
    what = "asked again" if same else "went on" if len(following.messages) > len(one.messages) else "asked otherwise"
    return f"{what}, not streaming," if one.request.stream and not following.request.stream else what


def _some(waits: Sequence[str]) -> str:
    return " ".join(waits) if len(waits) <= 4 else f"{' '.join(waits[:3])} .. {waits[-1]} ({len(waits)} times)"


def end(episode: Episode) -> str:
    if episode.session.truncated_by is not None:
        return f"cut off after {episode.request.timeout_seconds:g} s"
    return "finished the task" if FINAL in episode.artifacts.stdout else "did not finish"


def judgement(episode: Episode) -> str:
    failure = episode.session.failure
    return f"reward {episode.reward:g}" if failure is None else f"{failure.kind} (no reward)"


async def rows(options: argparse.Namespace) -> list[dict[str, str]]:
    """All runs, some at a time, in the order of the table."""
    places = asyncio.Semaphore(options.at_once)
    pairs = [(case, harness) for case in options.case or FAULTS for harness in options.harness or HARNESSES]
    with Progress(console=make_console(stderr=True)) as progress:
        bar = progress.add_task("sessions", total=len(pairs))

        async def one(case: str, harness: str) -> dict[str, str]:
            async with places:
                row = await run(harness, case, options)
            progress.advance(bar)
            return row

        return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


def show(found: Sequence[dict[str, str]]) -> Table:
    table = Table(*COLUMNS, title="What each harness does when the engine fails", show_lines=True)
    for row in found:
        table.add_row(*(row[column] for column in COLUMNS))
    return table


def markdown(found: Sequence[dict[str, str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[column] for column in COLUMNS] for row in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make show-errors", description=__doc__)
    parser.add_argument("--case", action="append", choices=FAULTS, help="only this case; may be given several times")
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; likewise")
    parser.add_argument("--times", type=int, default=2, help="how often the engine fails; 0: for good (default 2)")
    parser.add_argument("--limit", type=float, default=75, help="seconds until a run is cut off (default 75)")
    parser.add_argument("--slow", type=float, default=70, help="seconds until a slow engine's first token (default 70)")
    parser.add_argument("--hold", type=float, default=proxy.HOLD_SECONDS, help="see HOLD_SECONDS of the proxy")
    parser.add_argument("--keep-alive", type=float, default=proxy.KEEP_ALIVE_SECONDS, help="likewise")
    parser.add_argument("--at-once", type=int, default=4, help="how many sessions run at a time (default 4)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args(argv)


def main() -> None:
    options = parse(sys.argv[1:])
    proxy.HOLD_SECONDS, proxy.KEEP_ALIVE_SECONDS = options.hold, options.keep_alive
    found = asyncio.run(rows(options))
    make_console().print(show(found))
    if options.markdown:
        options.markdown.write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
