"""A command at its time limit is killed, or its sandbox ends."""

from __future__ import annotations

import asyncio

import pytest

from polar_gym.runtimes import Command, SandboxError, SandboxRequest, agent, lasting
from polar_gym.runtimes.kernel.uids import Claim
from polar_gym.runtimes.lasting import LastingSandbox
from polar_gym.runtimes.output import Output
from polar_gym.schema import RuntimeSpec


class Stubborn(LastingSandbox):
    """A sandbox whose command runs until it is killed, which fails at first."""

    def __init__(self, failures: int) -> None:
        super().__init__(SandboxRequest(session_id="s", spec=RuntimeSpec(name="any"), workspace=None), Claim(agent.UID))
        self._failures = failures
        self._killed = asyncio.Event()
        self.ended = False

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        await self._killed.wait()
        return 137

    async def kill_agent(self) -> None:
        self._failures -= 1
        if self._failures >= 0:
            raise SandboxError("1024 connections are open")
        self._killed.set()

    async def end(self) -> None:
        self.ended = True
        self._killed.set()

    async def remove(self) -> None: ...


class Left(Stubborn):
    """A sandbox whose command leaves processes, and ends with an exit code."""

    def __init__(self, code: int, failures: int = 0) -> None:
        super().__init__(failures)
        self._code = code

    @property
    def killed(self) -> bool:
        return self._killed.is_set()

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        return self._code


class Foiling(Stubborn):
    """A sandbox whose agent ends the command itself as often as it foils a kill, and lives on."""

    kills = 0

    async def kill_agent(self) -> None:
        self.kills += 1
        self._killed.set()
        if self.kills == 1:
            raise SandboxError("the agent killed what was to kill its processes")


COMMAND = Command(argv=["sleep", "1000"], timeout_seconds=0.01)


async def test_an_agent_that_foils_the_kill_at_its_limit_is_killed_again() -> None:
    """Guards against a process that lives on while its work is read: it had killed the killer and ended the command."""
    sandbox = Foiling(0)
    assert (await sandbox.exec(COMMAND)).timed_out
    assert (sandbox.kills, sandbox.ended) == (2, False)


async def test_a_kill_that_fails_is_tried_again() -> None:
    """Guards against a command that outlived its limit because the first attempt to kill it failed."""
    sandbox = Stubborn(failures=1)
    assert (await sandbox.exec(COMMAND)).timed_out
    assert not sandbox.ended


async def test_where_no_kill_succeeds_the_sandbox_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an agent that kept its sandbox, and its command, by making every kill fail."""
    monkeypatch.setattr(lasting, "KILL_ATTEMPTS", 2)
    sandbox = Stubborn(failures=2)
    with pytest.raises(SandboxError, match="could not be killed at its time limit; its sandbox was ended"):
        await sandbox.exec(COMMAND)
    assert sandbox.ended


@pytest.mark.parametrize(
    ("code", "untrusted", "killed"),
    [(0, False, False), (1, False, False), (137, False, True), (143, False, True), (0, True, True)],
)
async def test_what_a_command_left_is_killed(code: int, untrusted: bool, killed: bool) -> None:
    """Guards against an agent that killed the shell that ends all it left, or traced it to end with 0, and went on
    during its diff."""
    sandbox = Left(code)
    assert (await sandbox.exec(Command(argv=["true"], untrusted=untrusted))).exit_code == code
    assert sandbox.killed == killed


async def test_where_nothing_kills_what_a_command_left_the_sandbox_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an agent that went on because it also killed what was to kill it."""
    monkeypatch.setattr(lasting, "KILL_ATTEMPTS", 1)
    sandbox = Left(137, failures=1)
    with pytest.raises(SandboxError, match="what a command left could not be killed; its sandbox was ended"):
        await sandbox.exec(Command(argv=["true"]))
    assert sandbox.ended
