"""Measures the gateway against that of an earlier revision: `python -m benchmarks.against [REVISION] [--quick]`.

Both gateways run on the same core and ask the same mock engine, in alternating rounds, so that other work of the
machine affects both. The figure is CPU per call of this tree, divided by that of the revision in the same round; the
median of the rounds counts. The revision runs with the packages that are installed here. The exit status is 1 where a
case costs over `MOST` times as much, also in a second, longer measurement, and 2 where the revision's gateway does not
start with these packages.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load import measure
from benchmarks.processes import ROOT
from benchmarks.proxy import HEADLINE, Subject, engine, gateway
from benchmarks.report import Table
from benchmarks.wires import CHAT

MOST = 1.25
"""More than the medians of alternating rounds differ by on a busy machine."""
REAL = ("--streaming", "real")
CASES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "whole": ((), ()),
    "real streaming": (REAL, ()),
    "real streaming, 2 ms between events": (REAL, ("--pace", "0.002")),
}
"""Name of a case -> the options of the gateway and of the mock engine."""
CONNECTIONS = (1, 8)
LONG = (11, 1.0)
"""Rounds, and the seconds of a round."""


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yield a directory with the files of a revision."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-against-") as directory:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
        yield Path(directory)


def compare(earlier: Path, rounds: int, seconds: float) -> list[tuple[str, int, float, float]]:
    """Return for each case and number of connections the median of the rounds' ratios, and the largest ratio."""
    found = []
    for name, (options, of_engine) in CASES.items():
        with (
            engine(*of_engine) as mock,
            gateway(mock.url, *options, sessions=16) as new,
            gateway(mock.url, *options, sessions=16, root=earlier) as old,
        ):
            most, stream = max(CONNECTIONS), bool(options)
            subjects = [each.following(CHAT, HEADLINE, stream=stream, sessions=most) for each in (old, new)]
            for count in CONNECTIONS:
                ratios = asyncio.run(_ratios(subjects, count, rounds, seconds))
                found.append((name, count, statistics.median(ratios), max(ratios)))
    return found


async def _ratios(subjects: list[Subject], connections: int, rounds: int, seconds: float) -> list[float]:
    """Return the CPU of the second subject over that of the first, for each round. They take turns in being first."""
    ratios = []
    for number in range(rounds):
        cpu: dict[int, float] = {}
        for place in (0, 1) if number % 2 else (1, 0):
            each = subjects[place]
            requests = [each.request(connection) for connection in range(connections)]
            cpu[place] = (await measure(each.port, requests, each.pids, seconds=seconds)).cpu_ms
        ratios.append(cpu[1] / cpu[0])
    return ratios


def earlier_revision() -> str | None:
    """Return the commit from which this tree left origin's default branch, or the parent where the tree did not leave.
    None where the checkout has no such commit."""
    for command in (["merge-base", "HEAD", "origin/HEAD"], ["rev-parse", "--verify", "--quiet", "HEAD~1"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() != _head():
            return done.stdout.strip()
    return None


def _dear(found: Sequence[tuple[str, int, float, float]]) -> bool:
    return any(median > MOST for _, _, median, _ in found)


def _head() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", nargs="?", help="default: where this tree left origin's default branch, or HEAD~1")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    arguments = parser.parse_args()
    revision = arguments.revision or earlier_revision()
    if revision is None:
        parser.error("this checkout has one commit only; name a REVISION that it holds")
    with checkout(revision) as earlier:
        try:
            found = compare(earlier, *((5, 0.3) if arguments.quick else LONG))
            if _dear(found):
                found = compare(earlier, *LONG)
        except RuntimeError as error:
            print(f"{revision} cannot be measured here: {error}", file=sys.stderr)
            return 2
    columns = ("case", "c", f"CPU per call, x {revision[:12]}", "worst round")
    print(Table(columns=columns, rows=found).markdown())
    return int(_dear(found))


if __name__ == "__main__":
    sys.exit(main())
