"""What an episode says of an agent's work that could not be read to its end."""

from __future__ import annotations

import asyncio

import pytest

from polar_gym.gateway.session.work import read_work
from polar_gym.runtimes import Command, ExecResult
from polar_gym.schema import Artifacts


class UnreachableSandbox:
    """A sandbox whose runtime lost its connection."""

    base_url = ""

    async def exec(self, command: Command) -> ExecResult:
        raise TimeoutError(110, "Connection timed out")

    async def stop(self) -> None:
        """Do nothing."""


async def test_a_time_limit_of_the_runtime_is_not_taken_for_that_of_reading() -> None:
    """Guards against a failure that blames 600 seconds which never passed."""
    work = await read_work(UnreachableSandbox(), "/testbed", b"base", Artifacts())
    assert work.failure == "the agent's changes could not be read: [Errno 110] Connection timed out"


class EndlessSandbox:
    """A sandbox that lists files, and never ends its second command, the diff."""

    base_url = ""

    def __init__(self) -> None:
        self.at_the_diff = asyncio.Event()
        self._listed = False

    async def exec(self, command: Command) -> ExecResult:
        if self._listed:
            self.at_the_diff.set()
            await asyncio.Event().wait()
        self._listed = True
        return ExecResult(exit_code=0, stdout=b"/tmp/notes\n", stderr=b"")

    async def stop(self) -> None:
        """Do nothing."""


async def test_a_session_that_is_cancelled_during_the_diff_names_the_files_that_are_not_in_it() -> None:
    """Guards against an episode of a cancelled session that hides what the agent left in its home."""
    sandbox, artifacts = EndlessSandbox(), Artifacts()
    reading = asyncio.create_task(read_work(sandbox, "/testbed", b"base", artifacts))
    await sandbox.at_the_diff.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert artifacts.not_carried == ["/tmp/notes"]


class SlowlyKeptSandbox(UnreachableSandbox):
    """A whole container whose copy takes a while."""

    async def keep(self) -> str:
        await asyncio.to_thread(lambda: None)
        return "kept:1"


async def test_the_copy_of_a_large_container_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session without a reward where the copy takes longer than any diff may."""
    monkeypatch.setattr("polar_gym.gateway.session.work.READ_SECONDS", 0)
    work = await read_work(SlowlyKeptSandbox(), "/testbed", b"", Artifacts(), whole=True)
    assert (work.image, work.failure) == ("kept:1", "")
