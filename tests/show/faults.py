"""Two hundred sessions while everything is killed with SIGKILL at random: `make show-faults ARGS="--nodes 3"`.

Real processes: the rollout server, gateway nodes, an engine in vLLM's HTTP form, a receiver of callbacks. Killed are,
in rounds of random order: a gateway that has a session in each of the stages (one time in three for longer than its
lease), the server, it and all gateways at once, a harness, a sandbox (its PID 1, or its container), the receiver for
two seconds, the engine for thirty. Afterwards the laws of `tests/faults/laws.py` are checked.
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

from tests.faults.run import Faults, run, table_of
from tests.support.docker_daemon import own_daemon, running_daemon


async def main() -> None:
    parser = argparse.ArgumentParser(prog="make show-faults", description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=1, help="gateway nodes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind of process is killed")
    parser.add_argument("--docker", action="store_true", help="sandboxes are containers, not bubblewrap's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the directory of the run, and say where it is")
    given = parser.parse_args()
    faults = Faults(sessions=given.sessions, nodes=given.nodes, rounds=given.rounds, seed=given.seed)
    directory = Path(tempfile.mkdtemp(prefix="pg-faults-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        if not given.keep:
            stack.callback(shutil.rmtree, directory)
        if given.docker:
            faults.pools = {"init": 4, "ready": 2, "run": 3, "postrun": 2}  # containers take long to come up
            faults.docker_host = running_daemon() or stack.enter_context(own_daemon())
        outcome = await run(faults, directory)
    table = Table("what", "how many", title=f"Processes killed: {given.nodes} nodes, seed {given.seed}")
    for what, count in table_of(outcome):
        table.add_row(what, count)
    laws = Table("law", "breaches")
    for law, breaches in outcome.breaches.items():
        laws.add_row(law, str(len(breaches)) if breaches else "none")
    console = Console(width=100)
    if given.keep:
        console.print(f"kept: {directory}")
    console.print(table, laws)
    if wrong := [f"{law}: {each}" for law, breaches in outcome.breaches.items() for each in breaches]:
        sys.exit("\n".join(wrong[:50]))


if __name__ == "__main__":
    asyncio.run(main())
