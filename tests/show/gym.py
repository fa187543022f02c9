"""Run real CLIs on environments that ship with NeMo Gym 0.4 and 0.7, right and wrong: `make show-gym`.

For each case the program prints the reward of NeMo Gym's own `simple_agent` and that of each harness, which has the
environment's tools over MCP. A script plays the model on both sides; servers, agents, harnesses and verdicts are real.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.e2e.gym_environments import CONVERSATIONS, cases, gyms_own, ours, serving_environments
from tests.e2e.nemo_gym import INSTALL, PYTHONS, installed
from tests.show.result import OF_NPM, Result, make_parser, parse

(SAME, GRADED) = LAWS = (
    "every harness gets the reward of NeMo Gym's own agent on the same conversation",
    "in every environment the right conversation is worth 1 and the wrong one 0",
)
PROFILES = ("default", "lean")


async def show(version: str, harnesses: Sequence[str], environments: Sequence[str], result: Result) -> Table:
    """Run every case with every harness in both profiles, two sessions at once."""
    table = Table("environment", "conversation", "simple_agent", *harnesses, title=f"Rewards, NeMo Gym {version}")
    with tempfile.TemporaryDirectory(prefix="polar-gym-show-") as place:
        directory, chosen = Path(place), cases(version, environments)
        with serving_environments(version, chosen, directory) as urls:
            for case in chosen:
                expected = await gyms_own(case, urls)
                result.check(GRADED, [f"{case.name}: {expected}"] if expected != (case.conversation == "right") else [])
                cells: dict[str, list[float | None]] = {}
                for harness in harnesses:
                    for profile in PROFILES:
                        own = {"name": harness, "profile": profile}
                        episodes = await ours(case, urls, directory, own, samples=2)
                        rewards = [episode.reward for episode in episodes]
                        wrong = [f"{version} {case.name} {harness} {profile}: {rewards}"]
                        result.check(SAME, wrong if rewards != [expected] * 2 else [])
                        cells.setdefault(harness, []).extend(rewards)
                table.add_row(case.environment, case.conversation, f"{expected:g}", *map(_told, cells.values()))
                result.figures[f"{version} {case.name}"] = {"simple_agent": expected, **cells}
    return table


def _told(rewards: list[float | None]) -> str:
    each = dict.fromkeys("none" if reward is None else f"{reward:g}" for reward in rewards)
    return " or ".join(each)


def main() -> int:
    parser = make_parser("gym", __doc__, quick="NeMo Gym 0.4, and all but two environments and two harnesses")
    parser.add_argument("--version", action="append", choices=PYTHONS, help="only this one; may be given repeatedly")
    parser.add_argument("--harness", action="append", choices=OF_NPM, help="only this one; may be given repeatedly")
    parser.add_argument("--environment", action="append", choices=CONVERSATIONS, help="only this one; may be repeated")
    parser.set_defaults(version=list(PYTHONS), harness=OF_NPM, environment=list(CONVERSATIONS))
    quick = {
        "version": ["0.7.0"],
        "harness": ["codex", "claude_code"],
        "environment": ["example_session_state_mgmt", "math_advanced_calculations"],
    }
    options = parse(parser, quick=quick)
    if missing := [version for version in options.version if not installed(version)]:
        parser.error(f"NeMo Gym {', '.join(missing)} is missing; install it with: {INSTALL}")
    result = Result("gym", LAWS, options)
    for version in options.version:
        Console(width=150).print(asyncio.run(show(version, options.harness, options.environment, result)))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
