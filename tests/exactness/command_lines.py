"""Sessions of the agent CLIs: `polar-gym rollout` as a user starts it, with the recorder for an engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.exactness.books import Books, read_books
from tests.exactness.recorder import Recorder
from tests.exactness.recording import Answer, read_recording
from tests.exactness.stage import counter

SETTINGS = (
    *("runtime=bubblewrap", "engine=vllm", "harness.profile=lean", "harness.max_output_tokens=200"),
    *("budget.max_calls=16", "rollout.timeout_seconds=240", "proxy.streaming=real"),
)


@dataclass(slots=True)
class RolledOut:
    """What sessions of CLIs left."""

    answers: list[Answer] = field(default_factory=list)
    sessions: list[Books] = field(default_factory=list)
    sampled: int = 0
    """Tokens, by the engine's counter."""
    silent: list[str] = field(default_factory=list)
    """Harnesses of which a session made no call."""


async def roll_out(engine: str, directory: Path, harnesses: Sequence[str], sessions: int) -> RolledOut:
    """Run so many sessions of these harnesses together, one harness after the other."""
    directory.mkdir(parents=True)
    recorder = Recorder(engine, directory / "recording.jsonl")
    await recorder.start()
    rolled = RolledOut()
    async with aiohttp.ClientSession() as http:
        before = await counter(http, engine)
        for harness in harnesses:
            each = -(-sessions // len(harnesses))
            found = await _one(recorder.url, directory, harness, each)
            rolled.sessions += found
            called = sum(bool(books.calls) for books in found)
            if called < each:
                rolled.silent.append(f"{harness}: {called} of {each} sessions have calls")
        rolled.sampled = await counter(http, engine) - before
    await recorder.close()
    rolled.answers = read_recording(recorder.recording)
    return rolled


async def _one(engine: str, directory: Path, harness: str, sessions: int) -> list[Books]:
    output = directory / f"{harness}.jsonl"
    command = [
        *(sys.executable, "-c", "from polar_gym.cli import main; main()", "rollout", *SETTINGS),
        *(f"harness={harness}", f"engine.url={engine}"),
        *("tasks.limit=1", f"rollout.num_samples={sessions}", f"rollout.output={output}"),
    ]
    with (directory / f"{harness}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        await process.wait()
    episodes = [json.loads(line) for line in output.read_bytes().splitlines()] if output.exists() else []
    return [read_books(Path(episode["artifacts"]["journal"]), episode) for episode in episodes]
