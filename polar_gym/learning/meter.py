"""Measures the parts of a run: seconds, and CPU seconds of this process, of its sampling, and of the whole machine."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar_gym.engines.embedded.local_model import WORKER

STAT = Path("/proc/stat")
BUSY = (1, 2, 3, 6, 7)
"""The columns of the first line that count: user, nice, system, irq, softirq; see proc_stat(5)."""


class Meter:
    """Adds up what the parts of a run use."""

    def __init__(self) -> None:
        self._used: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Add what the body uses to the figures of a part."""
        before = _read()
        yield
        for name, value in _read().items():
            self._used[f"{part}_{name}"] += value - before[name]

    def used(self, part: str) -> bool:
        """Return whether a part was measured since the last `take`."""
        return f"{part}_seconds" in self._used

    def take(self) -> dict[str, float]:
        """Return the figures since the last call: `PART_seconds`, and the CPU seconds `PART_cpu` of this process,
        `PART_sampling_cpu` of the threads of it that sample, and `PART_machine_cpu` of all processes of the machine."""
        taken = {name: round(value, 2) for name, value in self._used.items()}
        self._used.clear()
        return taken


def peak_mib() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _read() -> dict[str, float]:
    columns = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    samplers = [thread.ident for thread in threading.enumerate() if thread.name.startswith(WORKER)]
    return {
        "seconds": time.monotonic(),
        "cpu": time.process_time(),
        "sampling_cpu": sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in samplers if ident),
        "machine_cpu": sum(int(columns[column]) for column in BUSY) / os.sysconf("SC_CLK_TCK"),
    }
