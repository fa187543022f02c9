"""Importing the package, the client or the command line loads no more than each needs, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polar_gym.cli import COMMANDS, app

HEAVY = {"hydra", "omegaconf", "gymnasium", "docker", "tokenizers", "jinja2"}
SHOWN = "import sys; print(*(name for name in sys.modules if '.' not in name), sep='\\n')"


def loaded_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{SHOWN}"], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    return set(done.stdout.splitlines())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import polar_gym") & {*HEAVY, "numpy", "pydantic", "aiohttp", "asyncio"} == set()


def test_importing_the_client_loads_no_config_and_no_environment() -> None:
    assert loaded_by("import polar_gym.client") & {*HEAVY, "typer", "rich"} == set()


def test_help_of_the_command_line_loads_no_command() -> None:
    program = "from polar_gym.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert loaded_by(program) & {*HEAVY, "numpy", "pydantic", "aiohttp", "asyncio"} == set()


@pytest.mark.parametrize("command", ["status", "inspect", "eval", "export", "doctor", "nemo-root"])
def test_a_command_without_a_config_loads_no_hydra(command: str) -> None:
    program = f"from polar_gym.cli import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass"
    assert loaded_by(program) & {"hydra", "omegaconf", "gymnasium", "docker"} == set()


def test_help_lists_every_command_in_its_own_words() -> None:
    listed = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"}).stdout.split())
    for command in COMMANDS:
        own = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"})
        assert own.exit_code == 0, own.output
        summary = own.stdout.splitlines()[3].strip()
        assert f"│ {command} {summary} │" in listed


@pytest.mark.parametrize("misspelt", ["rollot", "Tasks"])
def test_a_misspelt_command_is_told_the_nearest(misspelt: str) -> None:
    said = CliRunner().invoke(app, [misspelt])
    assert said.exit_code == 2
    assert "Did you mean" in said.output
