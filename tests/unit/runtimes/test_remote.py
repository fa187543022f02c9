"""A shared machine is free again for the next sandbox, however the one before ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from polar_gym.runtimes import SandboxError, SandboxRequest
from polar_gym.runtimes.remote import Remote, RemoteOptions, sandbox
from polar_gym.runtimes.remote.sandbox import HANDLE, LEAVE
from polar_gym.runtimes.remote.ssh import SshHandle, SshProvider
from polar_gym.schema import RuntimeSpec

SSH = """#!/bin/sh
for last; do :; done
case "$last" in *"while kill"*) [ ! -e {state}/stuck ] || exec sleep 1000 ;; esac
[ ! -e {state}/away ] || {{ cat {state}/away >&2; exit 255; }}
case "$last" in
    true) ;;
    *mktemp*) echo /tmp/polar-gym-AAAA 1000 ;;
    *mark=/tmp/polar-gym-taken*) [ ! -e {state}/full ] || {{ echo /work is not empty; exit 1; }}
        mv {state}/soon-away {state}/away
        echo /tmp/polar-gym-taken-1000 ;;
    *) cat > /dev/null ;;
esac
"""
"""In place of ssh: it runs nothing, and the network goes once a sandbox has taken the machine's paths. Files say
how it goes on: `away` (nothing is reached), `stuck` (a removal does not end), and `full` (the paths are taken)."""


def make(directory: Path) -> Remote:
    program = directory / "ssh"
    program.write_text(SSH.format(state=directory))
    program.chmod(0o755)
    config = {"host": "user@host", "program": str(program)}
    return Remote(RemoteOptions(provider="ssh", config=config, scratch=directory / "scratch"))


def request(session_id: str) -> SandboxRequest:
    return SandboxRequest(session_id=session_id, spec=RuntimeSpec(name="remote"), workspace=None)


async def fails(runtime: Remote, session_id: str, problem: str) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError, match=problem):
            await runtime.start(request(session_id))


@pytest.mark.parametrize("removal", ["SandboxError", "TimeoutError"])
async def test_a_sandbox_that_neither_starts_nor_ends_does_not_keep_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, removal: str
) -> None:
    """Guards against a network that goes during one start, after which all later sessions waited for ever: the removal
    failed too, or had no end and no time limit."""
    runtime = make(tmp_path)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "soon-away").write_text("no route to host")
    if removal == "TimeoutError":
        (tmp_path / "stuck").touch()
        monkeypatch.setattr(sandbox, "GIVE_UP_SECONDS", 0.1)
    await fails(runtime, "a", "could not be sent to the sandbox: .*no route to host")
    assert f"session a: a sandbox that did not start could not be removed: {removal}" in caplog.text
    (left,) = (tmp_path / "scratch").iterdir()
    assert (left / HANDLE).exists(), "a later gateway ends the sandbox by it"
    (tmp_path / "away").unlink()
    (tmp_path / "stuck").unlink(missing_ok=True)
    (tmp_path / "full").touch()
    await fails(runtime, "b", "/work is not empty")
    assert await runtime.reap(["a"]) == 1
    assert not any((tmp_path / "scratch").iterdir())


async def test_a_provider_that_does_not_end_a_removal_does_not_keep_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a session that waited for ever for its sandbox's removal, and kept its place."""

    class Hangs(SshProvider):
        async def close(self, handle: SshHandle) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(sandbox, "CLOSE_SECONDS", 0.01)
    provider: Any = Hangs(host="user@host")
    handle: Any = SshHandle("a")
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError, match=r"sandbox a could not be removed: .*not done within 0\.01 seconds"):
            await sandbox.end(provider, handle)


async def test_a_scratch_directory_that_cannot_be_made_does_not_keep_the_machine(tmp_path: Path) -> None:
    """Guards against a disk that is full once, after which all later sessions waited for ever."""
    runtime = make(tmp_path)
    with pytest.raises(FileNotFoundError):
        await runtime.start(request("a"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "full").touch()
    await fails(runtime, "b", "/work is not empty")
    assert not any((tmp_path / "scratch").iterdir())


def test_a_relay_that_is_a_zombie_is_dead(tmp_path: Path) -> None:
    """Guards against a removal that waited for ever where the machine's first process reaps no orphans."""
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    mark, taken = tmp_path / "mark", tmp_path / "taken"
    mark.write_text(f"{zombie.pid}\n")
    (taken / "deep").mkdir(parents=True)
    subprocess.run(["sh", "-c", LEAVE, "sh", mark, taken], check=True, timeout=20)
    zombie.wait()
    assert not mark.exists()
    assert not taken.exists()


def test_a_relay_that_lives_is_ended(tmp_path: Path) -> None:
    relay = subprocess.Popen(["sleep", "1000"])
    mark = tmp_path / "mark"
    mark.write_text(f"{relay.pid}\n")
    subprocess.run(["sh", "-c", LEAVE, "sh", mark, tmp_path / "none"], check=True, timeout=20)
    assert relay.wait() == -15
