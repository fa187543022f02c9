"""`python -m benchmarks [NAME]... [--quick] [--out DIR]`: measure, and write `report.md` with its plots."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks import builder, group, harness_cost, large_call, node, peers, proxy_cases, stages, trainer_cost
from benchmarks.report import Benchmark, write

BENCHMARKS: dict[str, Benchmark] = {
    "proxy": proxy_cases.measure,
    "peers": peers.measure,
    "large_call": large_call.measure,
    "builder": builder.measure,
    "stages": stages.measure,
    "trainer_cost": trainer_cost.measure,
    "node": node.measure,
    "group": group.measure,
    "harness_cost": harness_cost.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: to see that all works")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="default: build/bench")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    sections, page = [], arguments.out / "report.md"
    for name in arguments.names or BENCHMARKS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        sections.append(BENCHMARKS[name](arguments.quick))
        write(sections, page, shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))  # a later benchmark may fail
    print(page.read_text(encoding="utf-8"))
    print(f"written to {page}", file=sys.stderr)


if __name__ == "__main__":
    main()
