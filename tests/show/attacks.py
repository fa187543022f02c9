"""Try every attack on the grader, on each way to run tests, and print what became of it.

    python -m tests.show.attacks [GROUND...]

`unguarded` is what a grader would have given that applies the whole diff, runs the command and reads the log.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

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


async def unguarded(bench: Bench, task: Task, diff: bytes) -> float:
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


async def show(ground: Ground, console: Console) -> int:
    table = Table("attack", "what it tried", "what stopped it", "unguarded", "reward", title=f"Tests run by {ground}")
    rewarded = 0
    with tempfile.TemporaryDirectory() as directory:
        bench = make_bench(Path(directory))
        bench.offer_pytest()
        task = task_for(ground, bench.directory)
        honest = await bench.evaluate(task, task.patch.encode())
        table.add_row("(none: the solution)", "to solve the task", "-", "-", f"{honest.reward:g}", end_section=True)
        for attack in ATTACKS:
            if ground not in attack.grounds:
                continue
            diff = await bench.diff_after(task, attack.script(ground))
            bare = await unguarded(bench, task, diff)
            result = await bench.evaluate(task, diff)
            rewarded += result.reward > 0
            detail = result.detail.splitlines()[0]
            if "not counted: " in detail:
                detail = f"does not count: {detail.partition('not counted: ')[2]}"
            table.add_row(attack.name, attack.tries, detail[:110], f"{bare:g}", f"{result.reward:g}")
    console.print(table)
    return rewarded + (honest.reward != 1.0)


async def main() -> int:
    console = Console(width=200)
    grounds: list[Ground] = [ground for ground in GROUNDS if ground in sys.argv[1:] or len(sys.argv) == 1]
    return sum([await show(ground, console) for ground in grounds])


if __name__ == "__main__":
    sys.exit(min(asyncio.run(main()), 1))
