"""What is said of an agent's work that cannot be read."""

from __future__ import annotations

from polar_gym.gateway.session.work import read_work
from polar_gym.runtimes import Command, ExecResult


class UnreachableSandbox:
    """A sandbox whose runtime lost its connection."""

    base_url = ""

    async def exec(self, command: Command) -> ExecResult:
        raise TimeoutError(110, "Connection timed out")

    async def stop(self) -> None:
        """Do nothing."""


async def test_a_time_limit_of_the_runtime_is_not_taken_for_that_of_reading() -> None:
    """Guards against a failure that blames 600 seconds which never passed."""
    work = await read_work(UnreachableSandbox(), "/testbed", b"base")
    assert work.failure == "the agent's changes could not be read: [Errno 110] Connection timed out"
