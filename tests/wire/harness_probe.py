"""Runs a real harness as its users do, as a plain process with a home of its own, against a stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polar_gym.harnesses import Harness, LaunchContext
from polar_gym.harnesses.install import InstallError, executable, install
from polar_gym.schema import HarnessSpec
from tests.support.requirements import need
from tests.wire.stand_in import StandIn

CACHE = Path(os.environ.get("POLAR_GYM_CACHE", Path.home() / ".cache" / "polar-gym"))
LIMIT_SECONDS = 90


@dataclass(frozen=True)
class Run:
    exit_code: int | None
    stdout: str
    stderr: str
    workdir: Path


def installed(harness: Harness) -> list[str]:
    """The argv prefix of the harness, really installed; without a registry or a cache the test is skipped."""
    try:
        modules = install(harness, CACHE)
    except InstallError as error:
        need(False, f"{harness.package} ({error})", "a reachable registry, a filled POLAR_GYM_CACHE, or a newer Python")
        raise
    return executable(harness, str(modules), "node")


async def run_harness(
    harness: Harness,
    stand_in: StandIn,
    place: Path,
    instruction: str,
    *,
    profile: Literal["default", "lean"] = "default",
    context_length: int = 65536,
    max_output_tokens: int = 16384,
) -> Run:
    home, workdir = place / "home", place / "work"
    home.mkdir()
    workdir.mkdir()
    launch = harness.launch(
        LaunchContext(
            spec=HarnessSpec(name="any", profile=profile, max_output_tokens=max_output_tokens),
            base_url=stand_in.base_url,
            api_key=stand_in.key,
            context_length=context_length,
            instruction=instruction,
            home=str(home),
            workdir=str(workdir),
            executable=await asyncio.to_thread(installed, harness),
        )
    )
    for name, text in launch.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    process = await asyncio.create_subprocess_exec(
        *launch.argv,
        cwd=workdir,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **launch.environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = await asyncio.wait_for(process.communicate(launch.stdin), LIMIT_SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Run(process.returncode, stdout.decode(), stderr.decode(), workdir)
