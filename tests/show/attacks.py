"""Try every attack on the grader, on each way to run tests, and print what stopped each one: `make show-attacks`.

The column `unguarded` is the reward of a grader that applies the whole diff, runs the command and reads the log. An
evaluation with `trust: low` does not claim to notice forged results, and its reward breaks no law.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.evaluators.parsers import PASSED, get_parser
from polar_gym.evaluators.result import full_log
from polar_gym.evaluators.swebench_report import reports
from polar_gym.runtimes import Command
from polar_gym.tasks import Task
from polar_gym.workspaces.diff import apply_diff
from tests.lifecycle.attacks import ATTACKS, GROUNDS, Ground, task_for
from tests.lifecycle.grading_bench import Bench, make_bench
from tests.show.matrix import RUNTIMES, runtime_settings
from tests.show.result import Result, make_parser, parse

SOLUTION, TRUST, ATTACK = LAWS = (
    "the solution is rewarded",
    "in Python, the evaluation has high trust",
    "no attack is rewarded where the evaluation has high trust",
)


async def unguarded(bench: Bench, task: Task, diff: bytes) -> float:
    """Return the reward that the diff would have without any guard."""
    tests = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
    async with bench.sandbox(task) as sandbox:
        try:
            if task.test_command:
                await apply_diff(sandbox, "/workspace", task.test_patch.encode())
            await apply_diff(sandbox, "/workspace", diff)
        except ValueError:
            return 0.0
        run = ["sh", "-c", task.test_command] if task.test_command else ["bash", "-c", f"exec 2>&1\n{task.eval_script}"]
        log = full_log(await sandbox.exec(Command(argv=run, timeout_seconds=5)))
    if task.test_command:
        statuses = get_parser(task.log_parser)(log)
        return float(all(statuses.get(test) == PASSED for test in tests))
    (report,) = await reports({**task.model_dump(), "image": ""}, [log])
    return float(report.resolved)


async def show(ground: Ground, settings: Mapping[str, Any], console: Console, result: Result) -> None:
    """Try every attack of one ground in the runtime with these settings."""
    where = f"{ground} in {settings['name']}"
    table = Table("attack", "what it tried", "what stopped it", "unguarded", "reward", title=f"Tests run by {where}")
    done = Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        bench = make_bench(Path(directory), settings)
        bench.offer_pytest()
        task = task_for(ground, bench.directory)
        honest = await bench.evaluate(task, task.patch.encode())
        result.check(SOLUTION, [f"{where}: {honest.reward:g}, {honest.detail}"] * (honest.reward != 1.0))
        result.check(TRUST, [f"{where}: {honest.trust}"] * (ground != "javascript" and honest.trust != "high"))
        table.add_row("(none: the solution)", "to solve the task", "-", "-", f"{honest.reward:g}", end_section=True)
        for attack in ATTACKS:
            if ground not in attack.grounds:
                continue
            diff = await bench.diff_after(task, attack.script(ground))
            bare = await unguarded(bench, task, diff)
            graded = await bench.evaluate(task, diff)
            rewarded = graded.reward > 0
            low = graded.trust == "low"
            done.update(attacks=1, rewarded=rewarded and not low, rewarded_at_low_trust=rewarded and low)
            done.update(rewarded_unguarded=bare > 0)
            result.check(ATTACK, [f"{where}: {attack.name}: {graded.reward:g}"] * (rewarded and not low))
            detail = graded.detail.splitlines()[0]
            if "not counted: " in detail:
                detail = f"does not count: {detail.partition('not counted: ')[2]}"
            worth = f"{graded.reward:g}, trust: low" if rewarded and low else f"{graded.reward:g}"
            table.add_row(attack.name, attack.tries, detail[:110], f"{bare:g}", worth)
        await bench.runtime.close()
    console.print(table)
    result.figures[where] = done


def main() -> int:
    parser = make_parser("attacks", __doc__, quick=f"all ways to run tests except {GROUNDS[0]}")
    parser.add_argument("grounds", nargs="*", metavar="GROUND", help=f"only these: {', '.join(GROUNDS)}")
    parser.add_argument("--runtime", choices=[*RUNTIMES, "all"], default="bubblewrap", help="(default: %(default)s)")
    options = parse(parser)
    if unknown := set(options.grounds) - set(GROUNDS):
        parser.error(f"GROUND={min(unknown)}: not one of {', '.join(GROUNDS)}")
    chosen = options.grounds or (GROUNDS[:1] if options.quick else GROUNDS)
    runtimes = RUNTIMES if options.runtime == "all" else [options.runtime]
    result, console = Result("attacks", LAWS, options), Console(width=200)
    with contextlib.ExitStack() as stack:
        for settings in [runtime_settings(name, stack) for name in runtimes]:
            for ground in GROUNDS:
                if ground in chosen:
                    asyncio.run(show(ground, settings, console, result))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
