"""The laws that a provider's author can try hold where they should. `test_unconfined` has where they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from polar_gym.errors import ConfigError
from polar_gym.runtimes.conformance import main, specs
from polar_gym.runtimes.laws import LAWS
from tests.lifecycle.runtime_kinds import broken_laws
from tests.support import sandbox_provider
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need_bubblewrap

__all__ = ["docker_host"]

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="root only: the provider of tests")


BROKEN = {} if os.geteuid() == 0 else {"processes are limited": "b'' in place of b'refused'"}
"""What a plain user's bubblewrap cannot do where no control group can be made."""


async def test_they_hold_in_bubblewrap() -> None:
    need_bubblewrap()
    broken = await broken_laws("runtime=bubblewrap")
    assert broken in ({}, BROKEN)


async def test_they_hold_in_docker(docker_host: str) -> None:
    assert await broken_laws("runtime=docker", f"runtime.host={docker_host}") == {}


@ROOT
async def test_they_hold_with_a_provider(tmp_path: Path) -> None:
    need_bubblewrap()
    with sandbox_provider.installed(tmp_path):
        broken = await broken_laws("runtime=remote", "runtime.provider=boxes")
    assert broken == {"processes are limited": "b'' in place of b'refused'"}, "the protocol has no such limit"


def test_the_table_has_a_column_for_each_runtime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_bubblewrap()
    monkeypatch.setattr(sys, "argv", ["", "runtime=bubblewrap", "runtime=bubblewrap", "runtime.memory_mb=512"])
    with pytest.raises(SystemExit) as ended:
        main()
    holding = capsys.readouterr().out.count("holds")
    assert (ended.value.code, holding) in ((0, 2 * len(LAWS)), (len(BROKEN), 2 * (len(LAWS) - len(BROKEN))))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no runtime is named: expected runtime=NAME"),
        (["docker"], "'docker': expected runtime=NAME"),
        (["runtime=nothing"], "runtime=nothing: unknown runtime 'nothing'; known: "),
        (
            ["runtime=remote", "runtime.provider=nowhere"],
            "runtime=remote: runtime.provider: .*no installed package offers this provider",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        specs(arguments)
