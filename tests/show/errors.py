"""Show in a table what each harness does when the engine fails: `make show-errors`.

Every row is a run of a real harness in a real sandbox against the real gateway. The engine fails during the session
(`faulty_engine`): twice, or with `--times 0` until its end. A harness that goes on asking is cut off at `--limit`
seconds, and the table says so.
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
from polar_gym.engines import EngineError
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy import proxy, sending
from polar_gym.paths import cache_dir
from polar_gym.providers import Provider, routes
from polar_gym.schema import Episode, HarnessSpec, RuntimeSpec, TaskRequest
from tests.show.result import HARNESSES, Result, make_parser, parse
from tests.wire.faulty_engine import FAULTS, FINAL, Asked, FaultyEngine

EXACT, FINISHED, MASKED = LAWS = (
    "every session's token counts are exact",
    "a session that finished its task has a reward",
    "a session that ends at an error of the engine has no reward",
)
_NAMES = re.compile(rb'"(?:type|code|status)":"([\w.]+)"')
"""The parts of an error by which a client may decide."""

FINISHED_TASK = "finished the task"
COLUMNS = ("case", "harness", "requests", "sent", "reaction", "end", "exit", "judged as")


@dataclass
class Observed:
    """The errors that the gateway sent in place of answers."""

    refusals: list[str] = field(default_factory=list)

    def provider(self, provider: Provider) -> Provider:
        """Return the provider, with its errors also noted in `refusals`."""

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
    """Run one session and return its row of the table."""
    return (await run_session(harness, case, options)).row


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A session and its row of the table."""

    row: dict[str, str]
    episode: Episode
    error: EngineError | None
    """The engine's answer to the last request, if it was an error."""

    @property
    def breaches(self) -> dict[str, list[str]]:
        """The breaches of each law."""
        name = f"{self.row['harness']}, {self.row['case']}: {self.row['judged as']}"
        finished, rewarded = self.row["end"] == FINISHED_TASK, self.episode.session.failure is None
        engine_failed = self.error is not None and self.error.status != 400  # 400 blames the request
        return {
            EXACT: [name] * (not self.episode.trajectory.fidelity.exact),
            FINISHED: [name] * (finished and not rewarded),
            MASKED: [name] * (engine_failed and not finished and rewarded),
        }


async def run_session(harness: str, case: str, options: argparse.Namespace) -> Shown:
    """Run one session of a harness whose engine fails."""
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
    row = {
        "case": case,
        "harness": harness,
        "requests": str(len(engine.asked)),
        "sent": ", ".join(dict.fromkeys(observed.refusals)) or ("200, then its end" if fault.error else "200"),
        "reaction": reaction(engine.asked, cut=episode.truncated),
        "end": end(episode),
        "exit": "-" if episode.session.exit_code is None else str(episode.session.exit_code),
        "judged as": judgement(episode),
    }
    failed_last = bool(engine.asked) and engine.asked[-1].became == "fault"
    return Shown(row=row, episode=episode, error=fault.error if failed_last else None)


def reaction(asked: Sequence[Asked], *, cut: bool) -> str:
    """Return what the harness did after each fault. The first request of a run is never a fault."""
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
    return FINISHED_TASK if FINAL in episode.artifacts.stdout else "did not finish"


def judgement(episode: Episode) -> str:
    failure = episode.session.failure
    return f"reward {episode.reward:g}" if failure is None else f"{failure.kind} (no reward)"


async def run_all(options: argparse.Namespace) -> list[Shown]:
    """Run all sessions, some at a time, and return them in the order of the table."""
    places = asyncio.Semaphore(options.at_once)
    pairs = [(case, harness) for case in options.case for harness in options.harness]
    with Progress(console=make_console(stderr=True)) as progress:
        bar = progress.add_task("sessions", total=len(pairs))

        async def one(case: str, harness: str) -> Shown:
            async with places:
                shown = await run_session(harness, case, options)
            progress.advance(bar)
            return shown

        return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


def show(found: Sequence[dict[str, str]]) -> Table:
    table = Table(*COLUMNS, title="What each harness does when the engine fails", show_lines=True)
    for row in found:
        table.add_row(*(row[column] for column in COLUMNS))
    return table


def markdown(found: Sequence[dict[str, str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[column] for column in COLUMNS] for row in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with every case and every harness where none is named."""
    parser = make_parser("errors", __doc__, quick="all faults except 429, and all harnesses except pi and claude_code")
    parser.add_argument("--case", action="append", choices=FAULTS, help="only this case; may be given several times")
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; likewise")
    parser.add_argument("--times", type=int, default=2, help="how often the engine fails; 0: for good (default 2)")
    parser.add_argument("--limit", type=float, default=75, help="seconds until a run is cut off (default 75)")
    parser.add_argument("--slow", type=float, default=70, help="seconds until a slow engine's first token (default 70)")
    parser.add_argument("--hold", type=float, default=sending.HOLD_SECONDS, help="see HOLD_SECONDS of the proxy")
    parser.add_argument("--keep-alive", type=float, default=sending.KEEP_ALIVE_SECONDS, help="likewise")
    parser.add_argument("--at-once", type=int, default=4, help="how many sessions run at a time (default 4)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.set_defaults(case=list(FAULTS), harness=HARNESSES)
    return parse(parser, argv, quick={"case": ["429"], "harness": ["pi", "claude_code"]})


def main() -> int:
    options = parse_options()
    result = Result("errors", LAWS, options)
    sending.HOLD_SECONDS, sending.KEEP_ALIVE_SECONDS = options.hold, options.keep_alive
    sessions = asyncio.run(run_all(options))
    found = [session.row for session in sessions]
    make_console().print(show(found))
    if options.markdown:
        options.markdown.write_text(markdown(found), encoding="utf-8")
    result.figures["rows"] = found
    for session in sessions:
        for law, breaches in session.breaches.items():
            result.check(law, breaches)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
