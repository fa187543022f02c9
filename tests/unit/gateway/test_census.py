"""A node knows its sandboxes: those that sessions hold, and those that could not be removed, which it tries again."""

from __future__ import annotations

import asyncio

import pytest

from polar_gym.config.run_config import Pools
from polar_gym.gateway.session.sandboxes import Census, lifetime
from polar_gym.runtimes import Command, ExecResult, SandboxError
from polar_gym.schema import EvaluatorSpec, HarnessSpec, RuntimeSpec, StartFrom, TaskRequest


class Stubborn:
    """A sandbox that is removed at the second attempt."""

    base_url = ""
    attempts = 0

    async def exec(self, command: Command) -> ExecResult:
        raise NotImplementedError

    async def stop(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise SandboxError("the provider does not answer")


async def test_a_sandbox_that_could_not_be_removed_is_removed_later() -> None:
    """It was once logged and forgotten, and lived until its provider ended it."""
    census, sandbox = Census(), Stubborn()
    census.held[id(sandbox)] = sandbox
    await census.remove(sandbox, "one")
    assert (list(census.held), list(census.left.values())) == ([], [(sandbox, "one")])
    await census.remove_left()
    assert (census.left, sandbox.attempts) == ({}, 2)
    await census.remove_left()
    assert sandbox.attempts == 2


class Slow(Stubborn):
    """A sandbox whose removal waits for the test."""

    def __init__(self) -> None:
        self.asked, self.go_on, self.gone = asyncio.Event(), asyncio.Event(), False

    async def stop(self) -> None:
        self.asked.set()
        await self.go_on.wait()
        self.gone = True


async def test_a_removal_ends_also_when_its_session_is_cancelled() -> None:
    """Guards against half a removal: no list named the mounts, directories and user ids that stayed."""
    census, sandbox = Census(), Slow()
    census.held[id(sandbox)] = sandbox
    removing = asyncio.create_task(census.remove(sandbox, "one"))
    await sandbox.asked.wait()
    removing.cancel()
    await asyncio.sleep(0)
    assert list(census.held.values()) == [sandbox]
    sandbox.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert (sandbox.gone, census.held, census.left) == (True, {}, {})


def test_a_sandbox_lives_as_long_as_its_sessions_budgets() -> None:
    request = TaskRequest(
        task_id="t",
        instruction="i",
        timeout_seconds=1000,
        runtime=RuntimeSpec(name="remote", init_timeout_seconds=10),
        agent=HarnessSpec(name="pi"),
    )
    pools = Pools(init=2, ready=4, run=4, postrun=2)
    alone = lifetime(request, pools)
    grading = 10 + 600
    assert alone == 10 + 1000 + 600 + grading + 2 * 1000 + 2 * grading + 3600, "six are before it at four places"
    assert lifetime(request, pools.model_copy(update={"ready": 14})) == alone + 2 * 1000, "sixteen are"
    resumed = request.model_copy(update={"start_from": StartFrom(record="r")})
    assert lifetime(resumed, pools) == alone + 3 * 1000, "its replay may take as long again, and those before it"
    parts = {name: {"name": "test_on_output", "command": "true", "timeout_seconds": 7200} for name in "abc"}
    composite = EvaluatorSpec.model_validate({"name": "composite", "components": parts})
    graded = request.model_copy(update={"evaluator": composite})
    longer = 3 * (10 + 7200) - (10 + 600)
    assert lifetime(graded, pools) == alone + 3 * longer, (
        "parts are graded one after the other, each within its own time"
    )
