"""Audit the books of real sessions against a recording of the engine: `make show-exact`.

The auditor (`tests/exactness`) shares no code with the gateway. It records all that passes between gateway and engine,
and holds journals and episodes against that: the named cases, sessions of the six agent CLIs on a real vLLM with a
forward pass of the model for every trained token, random sessions of raw clients with cuts, errors and deaths, and
mistakes that are planted in clean records, each of which must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.e2e.vllm_server import VllmServer, run_server, trained_model, vllm_python
from tests.exactness import laws
from tests.exactness.cases import CASES, run_case
from tests.exactness.command_lines import roll_out
from tests.exactness.counters import COUNTED, check_counters, never_sent
from tests.exactness.fuzz import Round, play_round
from tests.exactness.mutations import MUTATIONS, clean_records, missed
from tests.exactness.scoring import SCORED, score
from tests.show.result import OF_NPM, Result, make_parser, parse

NAMED = "every named case passes"
CAUGHT = "every planted mistake is found"
MET = "every session of a CLI reached the engine"
LAWS = (NAMED, *laws.LAWS, COUNTED, SCORED, CAUGHT, MET)
ROUND_SESSIONS = 250
ROUND_SECONDS = 900


async def show_cases(result: Result, console: Console, directory: Path, engine: str | None) -> None:
    """Play the named cases, on the stand-in or on the engine at a URL."""
    where = "vLLM" if engine else "stand-in"
    table = Table("case", "", "first finding", title=f"Named cases on {where}")
    told = {}
    for case in CASES:
        if engine is not None and (case.engine or case.orders):
            continue
        wrong = await run_case(case, directory / f"{where}-{case.name}", engine)
        told[case.name] = "pass" if not wrong else wrong[0]
        table.add_row(case.name, "pass" if not wrong else "FAIL", wrong[0] if wrong else case.title)
        result.check(NAMED, [f"{case.name} on {where} ({case.title}): {one}" for one in wrong])
    console.print(table)
    result.figures[f"cases on {where}"] = told


async def show_fuzz(result: Result, console: Console, directory: Path, options: argparse.Namespace) -> None:
    """Play random sessions in rounds; a round is played again by `--seed N --fuzz SESSIONS`."""
    figures: Counter[str] = Counter()
    for number in range(-(-options.fuzz // ROUND_SESSIONS)):
        seed = options.seed + number
        sessions = min(ROUND_SESSIONS, options.fuzz - number * ROUND_SESSIONS)
        try:
            async with asyncio.timeout(ROUND_SECONDS):
                played = await play_round(seed, sessions, directory / f"fuzz-{seed}")
        except TimeoutError:
            result.check(laws.BOOKED, [f"round {seed}: its sessions did not end within {ROUND_SECONDS} seconds"])
            continue
        _take(result, f"round {seed} of {sessions} sessions", played)
        figures.update(played.figures)
    result.figures["fuzz"] = dict(figures)
    console.print(_figures("Random sessions of raw clients", figures))


def _take(result: Result, where: str, played: Round) -> None:
    for law, breaches in played.breaches.items():
        result.check(law, [f"{where}: {breach}" for breach in breaches])


def _figures(title: str, figures: Counter[str]) -> Table:
    table = Table("what", "how many", title=title)
    for name, count in sorted(figures.items()):
        table.add_row(name, f"{count:,}")
    return table


async def show_mutations(result: Result, console: Console, directory: Path) -> None:
    """Plant mistakes in the records of clean sessions."""
    found = missed(await clean_records(directory))
    result.check(CAUGHT, found)
    result.figures["mistakes planted"] = len(MUTATIONS)
    console.print(f"{len(MUTATIONS) - len(found)} of {len(MUTATIONS)} planted mistakes were found")


async def show_command_lines(
    result: Result, console: Console, directory: Path, server: VllmServer, python: Path, options: argparse.Namespace
) -> None:
    """Run sessions of the six CLIs on a real vLLM."""
    rolled = await roll_out(server.url, directory, OF_NPM, options.sessions)
    breaches, figures = laws.check(rolled.answers, rolled.sessions)
    breaches[COUNTED] = list(check_counters(rolled.sampled, rolled.answers, rolled.sessions))
    lost = never_sent(rolled.sampled, rolled.answers, rolled.sessions)
    figures.update({f"never in the books: {cause}": count for cause, count in lost.items()})
    scores = await asyncio.to_thread(score, rolled.sessions, python, trained_model(python))
    result.check(SCORED, scores.breaches)
    result.check(MET, rolled.silent)
    for law, found in breaches.items():
        result.check(law, found)
    result.figures["CLIs"] = dict(figures) | {
        "tokens scored": scores.tokens,
        "largest difference": scores.largest,
        "mean difference": scores.mean,
    }
    console.print(_figures("Sessions of the six CLIs on vLLM", figures))
    console.print(f"{scores.tokens:,} tokens scored: mean {scores.mean:.2e}, largest {scores.largest:.2e} nats")


async def show(result: Result, console: Console, directory: Path, options: argparse.Namespace) -> None:
    await show_mutations(result, console, directory / "mutations")
    await show_cases(result, console, directory, None)
    await show_fuzz(result, console, directory, options)
    python = vllm_python()
    if options.quick or python is None:
        return
    (directory / "vllm").mkdir()
    with run_server(python, directory / "vllm", trained_model(python)) as server:
        await show_cases(result, console, directory, server.url)
        await show_command_lines(result, console, directory / "cli", server, python, options)


def main() -> int:
    parser = make_parser("exact", __doc__, quick="vLLM, the CLIs, and most random sessions")
    parser.add_argument("--sessions", type=int, default=102, help="of the six CLIs together (default %(default)s)")
    parser.add_argument("--fuzz", type=int, default=10_000, help="random sessions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round of random sessions")
    options = parse(parser, quick={"fuzz": 300})
    if not options.quick and vllm_python() is None:
        sys.exit("vLLM is missing; install it with: python -m tests.e2e.vllm_server install")
    stated = tuple(law for law in LAWS if law not in (SCORED, MET)) if options.quick else LAWS
    result, console = Result("exact", stated, options), Console(width=120)
    with tempfile.TemporaryDirectory(prefix="pg-exact-") as name:
        asyncio.run(show(result, console, Path(name), options))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
