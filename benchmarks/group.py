"""Measures the preparation of a group of 16 and of the sandboxes that grade it: `python -m benchmarks group`.

The workspaces are that of a small task, and one of 20,000 files and 200 MiB. Their repository is made 16 times, as it
is where every sample has its own, and once for all samples, as sessions do. Then 32 sandboxes are started from it, four
at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.report import Figure, Section, Table
from polar_gym.runtimes import RUNTIMES, Runtime, SandboxRequest
from polar_gym.schema import RuntimeSpec
from polar_gym.workspaces.shared import Repositories

GROUP = 16
AT_ONCE = 4
MIB = 1 << 20
KINDS = ("bubblewrap", "docker")


def measure(quick: bool) -> Section:
    sizes = {"10 files": (10, 40_000), "2,000 files": (2000, 20 * MIB)}
    if not quick:
        sizes["20,000 files"] = (20_000, 200 * MIB)
    with tempfile.TemporaryDirectory(prefix="polar-gym-bench-") as directory:
        rows = []
        for name, (files, size) in sizes.items():
            _write(Path(directory, name), files, size // files)
            rows += asyncio.run(_group(name, Path(directory, name), Path(directory)))
    columns = ("workspace", "MiB", "16 repositories (s)", "one (s)", "runtime", "start, p50 (s)", "start, max (s)")
    text = (__doc__ or "").partition("\n\n")[2].strip()
    return Section(title="Group", text=text, tables=[Table(columns=columns, rows=rows)])


def _write(directory: Path, files: int, size: int) -> None:
    """Write files of which half can be compressed away."""
    dice = random.Random(0)
    for number in range(files):
        path = directory / f"d{number // 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dice.randbytes(size // 2).hex())


async def _group(name: str, source: Path, directory: Path) -> list[tuple[Figure, ...]]:
    alone = await _seconds(_apart(source, directory))
    repositories = Repositories(directory)
    shared = await _seconds(asyncio.gather(*(repositories.take(source, str(n)) for n in range(GROUP))))
    repository = await repositories.take(source, "0")
    rows: list[tuple[Figure, ...]] = []
    for kind in KINDS:
        runtime: Runtime = RUNTIMES.make(RuntimeSpec.model_validate({"name": kind, **_options(kind)}))
        if not await asyncio.to_thread(runtime.check):
            starts = await _starts(runtime, kind, repository.path)
            rows.append((name, repository.size / MIB, alone, shared, kind, statistics.median(starts), max(starts)))
        await runtime.close()
    return rows


def _options(kind: str) -> dict[str, str]:
    return {"host": os.environ["DOCKER_HOST"]} if kind == "docker" and "DOCKER_HOST" in os.environ else {}


async def _seconds(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def _apart(source: Path, directory: Path) -> None:
    """Make the repository of each sample by itself, as many at once as sandboxes."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with places:
            repositories = Repositories(directory, keep_bytes=0)
            await repositories.take(source, "")
            await repositories.give_back("")

    await asyncio.gather(*(one() for _ in range(GROUP)))


async def _starts(runtime: Runtime, kind: str, workspace: Path) -> list[float]:
    places, starts = asyncio.Semaphore(AT_ONCE), []

    async def one(number: int) -> None:
        async with places:
            spec = RuntimeSpec(name=kind)
            begun = time.perf_counter()
            sandbox = await runtime.start(
                SandboxRequest(session_id=f"group{number}", spec=spec, workspace=workspace, own_files=True)
            )
            starts.append(time.perf_counter() - begun)
            await sandbox.stop()

    await asyncio.gather(*(one(n) for n in range(2 * GROUP)))
    return starts
