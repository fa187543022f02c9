"""Measures the memory of a node's sessions, and the speed at which sandboxes are made: `python -m benchmarks node`.

Memory is the resident memory of the gateway process (real sessions without sandboxes). It is measured for a session
that was opened, and for one that has made its calls. The calls of a session share their histories. Sandboxes are
started, run one command and are stopped, several at once. A runtime that is not installed is named.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from pathlib import Path

from benchmarks.proxy import Gateway, engine, gateway
from benchmarks.report import Figure, Section, Table
from benchmarks.wires import CHAT
from polar_gym.runtimes import RUNTIMES, Command, Runtime, SandboxError, SandboxRequest
from polar_gym.schema import RuntimeSpec

OPENING = 4096
KINDS = {"bubblewrap": None, "docker": "debian:12-slim", "apptainer": None}
"""Runtime -> image; None: the machine's /usr."""
AT_ONCE = 4


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def measure(quick: bool) -> Section:
    sessions, turns = (32, 10) if quick else (200, 30)
    held: list[tuple[Figure, ...]] = []
    with engine() as mock:
        with gateway(mock.url, sessions=1) as small:
            empty = resident(small.pid)
        with gateway(mock.url, sessions=sessions * 5) as many:
            opened = resident(many.pid)
            held.append(("opened", sessions * 5, "-", (opened - empty) / (sessions * 5) * 1024, opened))
            tokens = _play(many, turns, sessions)
            grown = resident(many.pid)
            held.append((f"after {turns} calls", sessions, tokens, (grown - opened) / sessions * 1024, grown))
    columns = ("sessions", "number", "tokens of the last prompt", "KiB each", "process MiB")
    return Section(
        title="Node",
        text=(__doc__ or "").partition("\n\n")[2].strip(),
        tables=[Table(columns=columns, rows=held), asyncio.run(_sandboxes(12 if quick else 60))],
    )


def _play(many: Gateway, turns: int, sessions: int) -> int:
    return many.prompt_tokens(many.following(CHAT, OPENING, turns=turns, sessions=sessions))


async def _sandboxes(count: int) -> Table:
    rows: list[tuple[Figure, ...]] = []
    missing = []
    for name, image in KINDS.items():
        runtime: Runtime = RUNTIMES.make(RuntimeSpec(name=name))
        try:
            lacking = await asyncio.to_thread(runtime.check)
            if lacking:
                missing.append(f"{name} ({lacking[0].partition(';')[0]:.80})")
                continue
            spec = RuntimeSpec(name=name, image=image)
            await runtime.prepare([image] if image else [])
            rows.append((name, count, await _per_second(runtime, spec, count)))
        except SandboxError as error:
            missing.append(f"{name} ({str(error).splitlines()[0]:.80})")
        finally:
            await runtime.close()
    caption = f"Started, one command, stopped; {AT_ONCE} at once. Not measured: {'; '.join(missing) or 'none'}."
    return Table(columns=("runtime", "sandboxes", "per second"), rows=rows, caption=caption)


async def _per_second(runtime: Runtime, spec: RuntimeSpec, count: int) -> float:
    places, begun = asyncio.Semaphore(AT_ONCE), time.perf_counter()

    async def one() -> None:
        async with places:
            request = SandboxRequest(session_id=f"bench{secrets.token_hex(6)}", spec=spec, workspace=None)
            sandbox = await runtime.start(request)
            try:
                done = await sandbox.exec(Command(argv=["true"]))
                if done.exit_code:
                    raise SandboxError(f"`true` exited with {done.exit_code}: {done.stderr.decode(errors='replace')}")
            finally:
                await sandbox.stop()

    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - begun)
