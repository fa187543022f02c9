"""Runs the verifier of a Harbor task, in a fresh container with all files that the harness left.

The harness was root in its container, so it may have changed the shell, the interpreter and the libraries that the
verifier uses: no verdict has high trust. No process of the harness lives any more, and the tests come into the
container only now. The rules are those of Harbor 0.25 (`harbor.verifier.verifier`): `/tests/test.sh` runs as root in
the task's directory, its exit code does not count, and `/logs/verifier/reward.json` wins over `reward.txt`.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from polar_gym.evaluators import EvaluationContext, EvaluatorError, SuspectError
from polar_gym.evaluators.result import full_log, how_it_ended, kept_log
from polar_gym.registry import Names, Options
from polar_gym.runtimes import Command, Sandbox
from polar_gym.runtimes.files import UnreadableFileError, pack, read_file, unpack
from polar_gym.schema import Environment, EvaluationResult

AS_ROOT = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")

_CLEAR = (
    "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier /logs/agent /logs/artifacts && chmod 777 /logs/*"
)


class HarborOptions(Options):
    tests: Annotated[Path, Names.PATH]
    """The directory that becomes `/tests`."""
    environment: Environment = Field(default_factory=dict)
    """Environment variables of the verifier."""
    reward_key: str = "reward"
    """The reward among several keys of `reward.json`; a single key is the reward under any name."""


class Harbor:
    Options = HarborOptions

    def __init__(self, options: HarborOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        if context.diff_problem:
            return _result(problem=context.diff_problem)
        left = context.fresh_sandbox if context.control else context.left_sandbox
        if left is None:
            raise EvaluatorError("harbor grades a whole container: set runtime.scope=container")
        context.progress.carried = not context.control
        timeout = context.request.evaluator.timeout_seconds
        async with left() as sandbox:
            cleared = await sandbox.exec(Command(argv=["sh", "-c", _CLEAR], workdir="/", environment=AS_ROOT))
            if cleared.exit_code != 0:
                raise SuspectError(_result(problem=f"/tests and /logs cannot be cleared: {full_log(cleared).strip()}"))
            await unpack(sandbox, await asyncio.to_thread(pack, self._options.tests), "/tests")
            ended = await sandbox.exec(
                Command(
                    argv=["sh", "-c", "chmod +x /tests/test.sh; exec /tests/test.sh"],
                    environment={**AS_ROOT, **self._options.environment},
                    timeout_seconds=timeout,
                    untrusted=True,
                )
            )
            log = kept_log(full_log(ended))
            if ended.timed_out:
                raise SuspectError(_result(problem=f"the verifier {how_it_ended(ended, timeout)}", log=log))
            try:
                rewards = await self._rewards(sandbox)
            except ValueError as error:
                said = f"the verifier {how_it_ended(ended, timeout)}, and {error}"
                raise SuspectError(_result(problem=said, log=log)) from error
        return _result(rewards, self._options.reward_key, log=log)

    async def _rewards(self, sandbox: Sandbox) -> dict[str, float]:
        """Return the rewards that the verifier wrote. Raises `ValueError` where they are none."""
        for path in REWARDS:
            try:
                content = await read_file(sandbox, path)
            except FileNotFoundError:
                continue
            except UnreadableFileError as error:
                raise ValueError(str(error)) from error
            rewards = parse_rewards(path, content)
            if self._options.reward_key not in rewards and len(rewards) > 1:
                names = ", ".join(sorted(rewards))
                raise ValueError(f"{path} has no {self._options.reward_key!r} among {names}: set evaluator.reward_key")
            return rewards
        raise ValueError(f"wrote neither {' nor '.join(REWARDS)}")


def parse_rewards(path: str, content: bytes) -> dict[str, float]:
    """Return the rewards in a file. Raises `ValueError`."""
    text = content.decode(errors="replace").strip()
    problem = f"{path} holds no finite number: {text[:80]!r}"
    try:
        value: Any = json.loads(text) if path.endswith(".json") else {"reward": float(text)}
        if (
            not isinstance(value, dict)
            or not value
            or not all(isinstance(each, int | float) for each in value.values())
        ):
            raise ValueError(problem)
        rewards = {str(name): float(each) for name, each in value.items()}
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(problem) from error
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(problem)
    return rewards


def _result(
    rewards: dict[str, float] | None = None, key: str = "reward", *, problem: str = "", log: str = ""
) -> EvaluationResult:
    reward = 0.0 if not rewards else rewards[key] if key in rewards else next(iter(rewards.values()))
    return EvaluationResult(
        evaluator="harbor",
        reward=reward,
        resolved=reward >= 1,
        components=rewards if rewards and len(rewards) > 1 else {},
        detail=problem or f"the verifier wrote the reward {reward:g}",
        log=log,
        trust="low",
    )


EVALUATOR = Harbor
