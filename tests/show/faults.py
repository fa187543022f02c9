"""Run two hundred sessions while every process is killed with SIGKILL: `make show-faults ARGS="--nodes 3"`.

The processes are real: the rollout server, gateway nodes, an engine in vLLM's HTTP form, a receiver of callbacks. Each
round kills, in a random order: a gateway that has a session in each of the stages (one time in three for longer than
its lease), the server, the server and all gateways at once, a harness, a sandbox (its PID 1, or its container), the
receiver for two seconds, the engine for thirty. Afterwards the laws of `tests/faults/laws.py` are checked. There are
two runs: in the first, sessions go on after the death of their node; in the second, they begin again
(`retries.resume=false`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.run import LAWS, Faults, Outcome, run, table_of
from tests.show.result import Result, make_parser, parse
from tests.support.docker_daemon import own_daemon, running_daemon

RUNS = {"resumed": True, "begun again": False}


async def show(options: argparse.Namespace, directory: Path, resume: bool) -> Outcome:
    """Run the sessions, with a Docker daemon of this program's own where none runs."""
    faults = Faults(sessions=options.sessions, nodes=options.nodes, rounds=options.rounds, seed=options.seed)
    faults.resume = resume
    if options.quick:
        faults.engine_kills, faults.engine_away_seconds, faults.gateway_away_seconds = 1, 2.0, (0.0,)
    with contextlib.ExitStack() as stack:
        if options.docker:
            faults.pools = {"init": 4, "ready": 2, "run": 3, "postrun": 2}  # containers take long to come up
            faults.docker_host = running_daemon() or stack.enter_context(own_daemon())
        return await run(faults, directory)


def main() -> int:
    parser = make_parser("faults", __doc__, quick="two of three rounds, most sessions, kills that outlast a lease")
    parser.add_argument("--sessions", type=int, default=200, help="at least (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="gateway nodes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind of process is killed")
    parser.add_argument("--docker", action="store_true", help="sandboxes are containers, not bubblewrap's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the directory of the run, and say where it is")
    options = parse(parser, quick={"sessions": 12, "rounds": 1})
    result, console = Result("faults", LAWS, options), Console(width=100)
    for name, resume in RUNS.items():
        directory = Path(tempfile.mkdtemp(prefix="pg-faults-", dir="/tmp"))
        try:
            outcome = asyncio.run(show(options, directory, resume))
        finally:
            if options.keep:
                console.print(f"kept: {directory}")
            else:
                shutil.rmtree(directory)
        result.figures[name] = dict(table_of(outcome))
        for law, breaches in outcome.breaches.items():
            result.check(law, [f"{name}: {breach}" for breach in breaches])
    table = Table("what", *RUNS, title=f"Processes killed: {options.nodes} nodes, seed {options.seed}")
    for what in dict.fromkeys(what for figures in result.figures.values() for what in figures):
        table.add_row(what, *(figures.get(what, "0") for figures in result.figures.values()))
    console.print(table)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
