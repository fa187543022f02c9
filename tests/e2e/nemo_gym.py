"""The real NeMo Gym, in environments of its own: one for each version that the front door must work with.

They are shared by all checkouts, in `$POLAR_GYM_CACHE/nemo/<version>/venv`; polar-gym itself comes from PYTHONPATH.
Make them with

    python -m tests.e2e.nemo_gym install

The servers are started with NeMo Gym's own `gym env start`; `+skip_venv_if_present` and a link in place of the
environment that it would make for each server spare two minutes and the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar_gym.nemo import AGENT, component_root_for, link_agent
from tests.e2e.vllm_server import CHECKOUT, cache_directory

PYTHONS = {"0.4.0": "3.12", "0.7.0": "3.13"}
"""NeMo Gym's version -> the Python it runs on. 0.7.0 asks for 3.13.14 and later, and runs on any 3.13."""
INSTALL = "python -m tests.e2e.nemo_gym install"
READY_WITHIN_SECONDS = 1000
SERVERS = (
    AGENT,
    Path("environment_servers") / "legacy_agent",
    Path("responses_api_models") / "vllm_model",
)
"""What `gym env start` starts: 0.7 puts a server of its own before each agent; `--model-type` adds one."""


def venv_directory(version: str) -> Path:
    return cache_directory() / "nemo" / version / "venv"


def installed(version: str) -> bool:
    return _complete_mark(version).exists()


def install(version: str) -> None:
    """Make the environment, or add to it what requirements have come since."""
    directory = venv_directory(version)
    if installed(version):
        print(f"NeMo Gym {version} is there: {directory}")  # noqa: T201
        return
    python = PYTHONS[version]
    found = subprocess.run([CHECKOUT / ".ci" / "find-python", python], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit(f"NeMo Gym {version} needs Python {python} with its venv module: get it with apt, pyenv or uv")
    if not (directory / "bin" / "pip").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([found.stdout.strip(), "-m", "venv", directory], check=True)
    pip = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--ignore-requires-python"]
    subprocess.run([*pip, *_requirements(version)], check=True)
    _complete_mark(version).touch()


def _requirements(version: str) -> list[str]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [f"nemo-gym=={version}", "pytest", *sorted(project["dependencies"])]


def _complete_mark(version: str) -> Path:
    """Written last, so that an interrupted install is made again; changed requirements get a new one."""
    digest = hashlib.sha256("\n".join(_requirements(version)).encode()).hexdigest()[:16]
    return venv_directory(version) / f"complete-{digest}"


@dataclass(frozen=True)
class NemoGym:
    """One version of NeMo Gym and the directory that its commands are run in."""

    version: str
    directory: Path
    ray_directory: str
    """Short: it holds sockets."""
    port: int
    """Of the head server."""

    @property
    def root(self) -> Path:
        """The component root that `polar-gym nemo-root` prints beside this version."""
        return component_root_for(self.version, self.directory / "cache")

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{venv_directory(self.version)}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "RAY_TMPDIR": self.ray_directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(READY_WITHIN_SECONDS),
            "TMPDIR": str(self.directory / "scratch"),
        }

    @property
    def head(self) -> tuple[str, str]:
        """What the servers and their clients must say alike."""
        return "++head_server.host=127.0.0.1", f"++head_server.port={self.port}"

    def command(self, *arguments: str) -> list[str]:
        return ["gym", *arguments, "--search-dir", str(self.root)]

    def run(self, *arguments: str) -> str:
        """A command of NeMo Gym to its end: what it printed."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1000,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def evaluate(self, rows: Sequence[dict[str, Any]], agent: str, repeats: int = 1) -> list[dict[str, Any]]:
        """`gym eval run` over the rows, against the servers that run: one result for each rollout."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        reference = {"type": "responses_api_agents", "name": agent}
        rows_file, output = directory / "rows.jsonl", directory / "rollouts.jsonl"
        rows_file.write_text(
            "".join(json.dumps({**row, "agent_ref": reference}) + "\n" for row in rows), encoding="utf-8"
        )
        files = ("--input", str(rows_file), "--output", str(output))
        count = ("--num-repeats", str(repeats))
        self.run("eval", "run", "--no-serve", "--agent", agent, *files, *count, *self.head)
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@contextmanager
def nemo_gym(version: str, directory: Path) -> Iterator[NemoGym]:
    """An empty directory to run its commands in, as a user would."""
    directory.mkdir()
    (directory / "scratch").mkdir()
    if version == "0.4.0":
        link_agent(directory)
    for server in SERVERS:
        (directory / "venvs" / server).mkdir(parents=True)
        (directory / "venvs" / server / ".venv").symlink_to(venv_directory(version))
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_directory,
        socket.socket() as probe,
    ):
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        yield NemoGym(version, directory, ray_directory, port)


@contextmanager
def serving(gym: NemoGym, *options: str) -> Iterator[None]:
    """`gym env start`, until the context ends as Ctrl-C ends it."""
    log = gym.directory / "servers.log"
    skip = ("+skip_venv_if_present=true", f"+uv_venv_dir={gym.directory / 'venvs'}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            gym.command("env", "start", *options, *skip, *gym.head),
            env=gym.environment,
            cwd=gym.directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, log)
        yield
    finally:
        _stop(process, log)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline, said = time.monotonic() + READY_WITHIN_SECONDS, ""
    while time.monotonic() < deadline:
        said = log.read_text(encoding="utf-8", errors="replace")
        if "servers ready!" in said:
            return
        if process.poll() is not None:
            pytest.fail(f"`gym env start` ended with {process.returncode}; the end of its log:\n{said[-6000:]}")
        time.sleep(0.5)
    pytest.fail(f"NeMo Gym's servers were not ready in time; the end of their log:\n{said[-6000:]}")


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        pytest.fail(f"NeMo Gym's servers did not stop; the end of their log:\n{log.read_text()[-6000:]}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            for each in PYTHONS:
                install(each)
        case _:
            sys.exit(f"usage: {INSTALL}")
