"""Train sessions of real harnesses by NeMo RL's real code, without a GPU: `make show-nemo-rl NEMO_RL=DIRECTORY`.

DIRECTORY is a checkout of NeMo RL with its submodule NeMo Gym. NeMo RL's Ray actor starts NeMo Gym's servers and our
agent server. A step of `grpo_train` runs Pi and Codex in sandboxes, with a script as the policy. The table has two
sessions for each row of the data set: their tokens, groups and advantages, first where NeMo RL alone trains them (the
main trace), then with `recipes/nemo_rl/run_grpo.py` (all traces).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.console import make_console
from tests.e2e.vllm_server import CHECKOUT
from tests.nemo_rl.environment import check, install, variables
from tests.nemo_rl.gym import SUBMODULE, gym_checkout
from tests.nemo_rl.rollout_cases import CASES
from tests.nemo_rl.rollout_laws import LAWS, breaches
from tests.show.result import Result, make_parser, parse

HEADINGS = ("case", "session", "reward", "calls", "traces", "sampled")
ALONE, EVERY = ("trained", "groups", "advantage"), ("rows", "trained", "groups", "advantage")
Facts = dict[str, Any]


def sessions_of(checkout: Path, names: Sequence[str]) -> list[Facts]:
    """Run the cases in NeMo RL's environment. Return the facts of each session."""
    with tempfile.TemporaryDirectory(prefix="show-nemo-rl-") as directory:
        file, log = Path(directory) / "facts.json", Path(directory) / "log"
        with log.open("wb") as output:
            done = subprocess.run(
                [install(), "-m", "tests.nemo_rl.rollouts", file, *names],
                env=variables(checkout),
                cwd=CHECKOUT,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            sys.exit(f"NeMo RL ended with {done.returncode}; the end of its log:\n{log.read_text()[-6000:]}")
        return json.loads(file.read_text(encoding="utf-8"))


def table_of(sessions: Sequence[Facts]) -> Table:
    table = Table(title="sampled and trained tokens", title_justify="left", header_style="bold")
    names = (*HEADINGS, *(f"alone: {name}" for name in ALONE), *(f"all traces: {name}" for name in EVERY))
    for name in names:
        table.add_column(
            name, no_wrap=name == "case", overflow="fold", justify="left" if name in ("case", "session") else "right"
        )
    for session in sessions:
        together = [each for each in sessions if each["case"] == session["case"] and each["failure"] is None]
        groups = len({tuple(each["prompt"]) for each in together}) if session["failure"] is None else "masked"
        grouped = 1 if session["failure"] is None else "masked"
        first = (session["case"], session["plan"], f"{session['reward']:g}", f"{session['calls']:g}")
        counts = (session["traces"], session["sampled"])
        alone, every = session["alone"], session["every"]
        trained = (alone["tokens"], groups, *alone["advantages"])
        table.add_row(
            *map(str, (*first, *counts, *trained, every["rows"], every["tokens"], grouped, *every["advantages"]))
        )
    return table


def consumed(sessions: Sequence[Facts], part: str) -> float:
    """Return the share of the sampled tokens that is trained, of the sessions that did not fail."""
    usable = [session for session in sessions if session["failure"] is None]
    return sum(session[part]["tokens"] for session in usable) / sum(session["sampled"] for session in usable)


def main() -> int:
    quick = [case.name for case in CASES if case.quick]
    parser = make_parser("nemo-rl", __doc__, quick=f"all cases except {', '.join(quick)}")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these cases")
    options = parse(parser)
    checkout = Path(os.environ.get("NEMO_RL") or sys.exit("NEMO_RL=DIRECTORY is missing: a checkout of NeMo RL"))
    check(checkout)
    if gym_checkout(checkout) is None:
        sys.exit(f"NEMO_RL={checkout}: has no NeMo Gym; run git submodule update --init {SUBMODULE} there")
    result = Result("nemo-rl", LAWS, options)
    sessions = sessions_of(checkout.resolve(), options.cases or (quick if options.quick else []))
    make_console().print(table_of(sessions))
    shares = {name: round(consumed(sessions, part), 4) for name, part in (("alone", "alone"), ("all traces", "every"))}
    make_console().print(f"sampled tokens that are trained: {shares}")
    result.figures |= {
        "consumed": shares,
        "sessions": [{**session, "prompt": len(session["prompt"])} for session in sessions],
    }
    for law, found in breaches(sessions).items():
        result.check(law, found)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
