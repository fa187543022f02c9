"""What the wheel gives: the examples of the README and of docs/, in a new environment, far from the checkout."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from polar_gym.config.files import recipe_names
from polar_gym.paths import cache_dir, shipped_dir
from tests.support.requirements import need_bubblewrap, need_node

CHECKOUT = Path(__file__).parents[2]
README, COMMANDS = ((CHECKOUT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/command_line.md"))
NEEDS_MORE = ("engine.url=", "runtime=docker", "FILE", "REPOSITORY", "from-pypi", " -m ", "polar-gym learn")
"""Marks of the page's command lines that need a model server, a daemon, torch, or minutes."""

pytestmark = pytest.mark.timeout(600)


class Installed:
    """The wheel in an environment of its own, and an empty directory to work in."""

    def __init__(self, environment: Path, directory: Path) -> None:
        self.binaries = environment / "bin"
        self.directory = directory

    def run(self, command: Sequence[str | Path]) -> str:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=kept | {"PATH": f"{self.binaries}:{os.environ['PATH']}", "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What the wheel needs is kept between runs, for as long as it needs the same; the wheel itself is always new."""
    need_node()
    need_bubblewrap()
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", root, CHECKOUT], check=True, timeout=300)
    (wheel,) = root.glob("polar_gym-*.whl")
    needs = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    named = hashlib.sha256("\n".join([sys.version, *needs]).encode()).hexdigest()[:16]
    environment = cache_dir() / "wheel" / named
    venv.create(environment)
    subprocess.run([*pip, "--python", environment, "install", wheel], check=True, timeout=500)
    anew = ["install", "--no-deps", "--force-reinstall", wheel]
    subprocess.run([*pip, "--python", environment, *anew], check=True, timeout=300)
    (root / "empty").mkdir()
    return Installed(environment, root / "empty")


def test_the_readmes_python_example_runs(installed: Installed) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    (installed.directory / "example.py").write_text(example[1], encoding="utf-8")
    assert "reward 1.0" in installed.run([installed.binaries / "python", "example.py"])


def test_the_command_lines_of_their_page_run(installed: Installed) -> None:
    section = COMMANDS.partition("\n## ")[0]
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    (polar-gym .*)$", section, re.MULTILINE)]
    able = [line for line in lines if not any(mark in " ".join([*line, ""]) for mark in NEEDS_MORE)]
    assert len(able) >= 4, "the page shows what runs on any machine"
    said = {" ".join(line): installed.run([installed.binaries / line[0], *line[1:]]) for line in able}
    assert "mean reward 1.000 over 5 of 5 episodes" in said["polar-gym rollout demo"]


def test_the_recipes_compose_and_the_commands_of_their_readme_are_understood(installed: Installed) -> None:
    program = "from polar_gym import load_config\nfrom polar_gym.config.files import recipe_names\n"
    program += "for name in recipe_names(): print(load_config(name, ['engine=embedded']).rollout.output)"
    said = installed.run([installed.binaries / "python", "-c", program])
    assert len(said.splitlines()) == len(recipe_names())
    text = (CHECKOUT / "recipes" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python (-m polar_gym .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    shown = [
        installed.run([installed.binaries / "python", *shlex.split(command), "--cfg", "job", "--resolve"])
        for command in commands
    ]
    assert "output: outputs/claude_code_rollout.jsonl" in shown[0]
    assert shown[1].count("splice: 'off'") == 4, "a sweep of two harnesses and two temperatures"


def test_the_package_says_that_it_has_type_hints(installed: Installed) -> None:
    program = "import importlib.resources as r; print(r.files('polar_gym').joinpath('py.typed').is_file())"
    assert installed.run([installed.binaries / "python", "-c", program]).strip() == "True"


def test_configs_and_recipes_are_in_the_package(installed: Installed) -> None:
    said = installed.run([installed.binaries / "python", "-m", "polar_gym", "--help"])
    for recipe in recipe_names():
        assert recipe in said
    directory = Path(installed.run([installed.binaries / "polar-gym", "nemo-recipes"]).strip())
    assert CHECKOUT not in directory.parents
    shipped = shipped_dir("recipes") / "nemo_rl"
    files = [
        {path.name for path in place.iterdir() if path.is_file()} for place in (directory, shipped)
    ]  # no __pycache__
    assert files[0] == files[1]
    root = Path(installed.run([installed.binaries / "polar-gym", "nemo-root"]).strip())
    assert (root / "environments" / "polar_swe" / "evaluation.yaml").is_file()
    assert "rollout:" in installed.run([installed.binaries / "polar-gym", "rollout", "demo", "--cfg", "job"])
