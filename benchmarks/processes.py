"""Runs the processes of a measurement, each on a separate core as far as the machine has cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORES = sorted(os.sched_getaffinity(0))
MEASURED_CORE = CORES[0]
"""The core of the measured server. No other process of the benchmark runs there."""
LOAD_CORES = CORES[1:] or CORES
"""The cores of the client and the mock engine. The last core belongs to the client."""


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    said: str
    """The line that the server prints when it listens."""


@contextmanager
def server(module: str, *arguments: str, core: int = MEASURED_CORE, root: Path = ROOT) -> Iterator[Server]:
    """Run `python -m module arguments` in a checkout. The context begins when the module says that it listens."""
    with running([sys.executable, "-m", module, *arguments], core=core, root=root) as process:
        assert process.stdout is not None
        said = process.stdout.readline().decode().strip()
        if not said:
            raise RuntimeError(f"{module} did not start: exit status {process.wait()}")
        yield Server(process.pid, said)


@contextmanager
def running(
    command: Sequence[str],
    *,
    core: int = MEASURED_CORE,
    log: int | None = None,
    environment: dict[str, str] | None = None,
    root: Path = ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on one core. Its process group ends with the context."""
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *command],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if log is None else log,
        stderr=None if log is None else log,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the process ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
