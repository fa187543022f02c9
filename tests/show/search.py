"""Search for diffs that are rewarded without a solution, by chance combinations of attacks: `make show-search`.

`make show-attacks` tries known attacks one by one. This program combines fragments (`tests/attack_search`) whose
authors did not know the grader's defences. A try draws one to three fragments, the place and the moment of each, and
perhaps a change that looks honest. An agent's sandbox makes the diff of it, and the real grader grades the diff. Plans
with a rare outcome are changed and tried again. A diff that is rewarded is kept with the seed, the plan and the
fragments that do it alone. `--replay FILE` grades the kept diffs again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.console import make_console
from tests.attack_search.exploring import Breach, Graded, Grader, Search
from tests.attack_search.fragments import FAMILIES, FRAGMENTS
from tests.attack_search.grounds import Ground, grounds
from tests.attack_search.plan import plan_from
from tests.lifecycle.grading_bench import Bench, make_bench
from tests.show.result import Result, make_parser, parse

SOLVED, TRUST, REFUSED, JUDGED = LAWS = (
    "the solution is rewarded",
    "in Python, the evaluation has high trust",
    "no attack is rewarded where the evaluation has high trust",
    "no attack leaves its session without a verdict",
)
LOW = "node"
"""The ground without twins: its evaluations have low trust, and what is rewarded there breaks no law."""
NAMES = ("intervals", "durations", "pytest", "script", "node")
ALL = float("inf")


def real_grader(bench: Bench) -> Grader:
    async def grade(ground: Ground, diff: bytes) -> Graded:
        return await bench.evaluate(ground.task, diff)

    return grade


async def run(options: argparse.Namespace, seed: int, result: Result) -> Search:
    """Grade every ground's solution, and then explore."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-search-") as directory:
        bench = make_bench(Path(directory))
        bench.offer_pytest()
        every = grounds(Path(directory))
        chosen = {name: every[name] for name in dict.fromkeys(options.grounds)}
        grade = real_grader(bench)
        for ground in chosen.values():
            gold = await bench.evaluate(ground.task, ground.task.patch.encode())
            result.check(SOLVED, [f"{ground.name}: {gold.detail}"] * (gold.reward != 1.0))
            result.check(TRUST, [f"{ground.name}: {gold.trust}"] * (ground.name != LOW and gold.trust != "high"))
        search = Search(bench=bench, grounds=chosen, fragments=FRAGMENTS, grade=grade, seed=seed)
        search.kept = lambda: keep(search, result.path)
        if options.replay:
            await replay(search, options.replay)
        else:
            await search.explore(options.minutes * 60, workers=options.workers, most=options.tries, enough=ALL)
    return search


async def replay(search: Search, file: Path) -> None:
    """Grade the diffs again that an earlier search kept."""
    for record in json.loads(file.read_text(encoding="utf-8")):
        ground = search.grounds[record["plan"]["ground"]]
        verdict = await search.grade(ground, record["diff"].encode("utf-8", "surrogateescape"))
        search.tries, search.graded = search.tries + 1, search.graded + 1
        search.outcomes[f"{ground.name} {record['fragments']}: {verdict.reward} {verdict.detail}"] += 1
        if verdict.reward:
            search.breaches.append(_again(record, verdict))


def _again(record: Mapping[str, Any], verdict: Graded) -> Breach:
    diff = record["diff"].encode("utf-8", "surrogateescape")
    plan = plan_from(record["plan"])
    return Breach(plan=plan, number=record["try"], diff=diff, reward=verdict.reward, detail=verdict.detail)


def show(search: Search) -> Table:
    table = Table("outcome", "diffs", title=f"{search.graded} distinct diffs of {search.tries} tries")
    for outcome, count in search.outcomes.most_common():
        table.add_row(outcome, str(count))
    return table


def keep(search: Search, results: Path, suffix: str = ".breaches.json") -> Path:
    """Write what was rewarded so far to a file beside the results, and return its path."""
    file = results.with_suffix(suffix)
    kept = [breach.as_json(search.seed) for breach in (*search.breaches, *search.unjudged)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return file


def check(search: Search, seed: int, result: Result) -> None:
    """Hold the search against the laws."""
    file = keep(search, result.path, ".replayed.json" if result.options.replay else ".breaches.json")
    rewarded = [breach for breach in search.breaches if breach.plan.ground != LOW]
    for law, breaches in ((REFUSED, rewarded), (JUDGED, search.unjudged)):
        result.check(law, [_said(breach, file) for breach in breaches])
    result.figures = {
        "seed": seed,
        "tries": search.tries,
        "diffs_graded": search.graded,
        "rewarded": len(rewarded),
        "rewarded_at_low_trust": len(search.breaches) - len(rewarded),
        "fragments": len(FRAGMENTS),
        "families": {family: len(found) for family, found in FAMILIES.items()},
        "fragments_used": len(search.used),
        "outcomes": dict(search.outcomes.most_common()),
        "examples": search.examples,
    }


def _said(breach: Breach, file: Path) -> str:
    fragments = " + ".join(breach.plan.fragments)
    alone = f"; alone: {', '.join(breach.alone)}" if breach.alone else ""
    return f"{breach.plan.ground}: {fragments} (try {breach.number}; {breach.detail}{alone}; diff in {file})"


def main() -> int:
    parser = make_parser("search", __doc__, quick="all tries after one minute")
    parser.add_argument("--minutes", type=float, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--tries", type=float, default=ALL, help="how many at most (default: while there is time)")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: by chance)")
    parser.add_argument("--grounds", nargs="+", choices=NAMES, default=list(NAMES), help="tasks (default: all)")
    parser.add_argument("--replay", type=Path, help="grade the diffs of this file of breaches again, and draw none")
    options = parse(parser, quick={"minutes": 1.0})
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    result = Result("search", LAWS, options)
    search = asyncio.run(run(options, seed, result))
    check(search, seed, result)
    console = make_console()
    console.print(show(search))
    console.print(
        f"seed {seed}: {search.tries} tries, {search.graded} distinct diffs graded, {len(search.breaches)} rewarded"
    )
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
