"""Graders without a defence. A search that finds nothing here proves nothing anywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from polar_gym.runtimes import Command, Sandbox
from polar_gym.workspaces.diff import apply_diff
from tests.attack_search.exploring import Grader
from tests.attack_search.grounds import Ground
from tests.lifecycle.grading_bench import Bench

Reads = Literal["status", "log"]
_PASSED = re.compile(r"^(\S+) .*?(?:\.\.\. |)ok$|^PASSED (\S+)|^ok \d+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Naive:
    """The verdict of a grader that believes what it is told."""

    reward: float
    detail: str


def weak_grader(bench: Bench, reads: Reads) -> Grader:
    """Return a grader that applies the whole diff over the hidden tests, and believes the exit status or the log."""

    async def grade(ground: Ground, diff: bytes) -> Naive:
        task = ground.task
        async with bench.sandbox(task) as sandbox:
            for patch in (task.test_patch.encode(), diff):
                try:
                    await apply_diff(sandbox, "/workspace", patch)
                except ValueError:
                    return Naive(0.0, "the diff does not apply")
            return await _believed(sandbox, ground, reads)

    return grade


async def _believed(sandbox: Sandbox, ground: Ground, reads: Reads) -> Naive:
    command = ground.task.test_command or f"node --test --test-reporter=tap {ground.test_file}"
    if ground.language == "python" and not ground.task.test_command:
        command = f"python3 -m pytest -rA --color=no {ground.test_file}"
    result = await sandbox.exec(Command(argv=["sh", "-c", command], timeout_seconds=5))
    if reads == "status":
        return Naive(float(result.exit_code == 0), f"exit status {result.exit_code}")
    log = (result.stdout + result.stderr).decode(errors="replace")
    wanted = {*ground.task.FAIL_TO_PASS, *ground.task.PASS_TO_PASS}
    passed = {_name(found) for found in _PASSED.finditer(log)}
    missing = {name for name in wanted if name not in passed and name.rpartition(".")[2] not in passed}
    return Naive(float(not missing), f"{len(missing)} tests not passed")


def _name(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group)
