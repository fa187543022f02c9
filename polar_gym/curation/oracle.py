"""Grades the reference solution of a task whose whole container is the harness's, and doing nothing in it (Harbor)."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from polar_gym.curation.bench import Bench
from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.harbor import AS_ROOT
from polar_gym.evaluators.result import full_log, how_it_ended
from polar_gym.runtimes import Command, LeftoverError, Sandbox, WholeSandbox
from polar_gym.runtimes.files import pack, unpack
from polar_gym.schema import HARNESS_SECONDS, EvaluationResult
from polar_gym.tasks import Container, Task

SOLVE = "chmod +x /solution/solve.sh; exec /solution/solve.sh"


async def grade_container(task: Task, bench: Bench, *, solve: bool) -> EvaluationResult:
    """Return the grade of a container in which the reference solution ran (`solve`), or nothing.

    Raises what `Bench.judge` and the runtime raise.
    """
    async with bench.sandbox(task) as sandbox:
        said = await _solve(sandbox, task.container) if solve and task.container is not None else ""
        assert isinstance(sandbox, WholeSandbox), "check_offered let the runtime through"
        try:
            image = await sandbox.keep()
        except LeftoverError as error:
            raise EvaluatorError(str(error)) from error
        left = dataclasses.replace(bench.context(task, b""), left_sandbox=lambda: bench.sandbox(task, image=image))
        result = await bench.judge(left)
    return result if result.resolved else result.model_copy(update={"detail": f"{result.detail}{said}"})


async def _solve(sandbox: Sandbox, container: Container) -> str:
    """Run the reference solution as Harbor does, and return how it ended; "" where it ended with 0."""
    await sandbox.exec(Command(argv=["mkdir", "-p", "/solution", "/logs/agent", "/logs/verifier", "/logs/artifacts"]))
    await unpack(sandbox, await asyncio.to_thread(pack, Path(str(container.solution))), "/solution")
    seconds = container.agent_seconds or HARNESS_SECONDS
    environment = {"DEBIAN_FRONTEND": "noninteractive", **AS_ROOT, **container.solution_environment}
    ended = await sandbox.exec(Command(argv=["sh", "-c", SOLVE], environment=environment, timeout_seconds=seconds))
    last = full_log(ended).strip().splitlines()[-1:]
    return "" if ended.exit_code == 0 else f"; solve.sh {how_it_ended(ended, seconds)}: {''.join(last)[:200]}"
