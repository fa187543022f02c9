"""A process removes the sandboxes of the sessions of an agent server that was killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from polar_gym.runtimes import scratch_directory

SERVER = """
import sys, time
from polar_gym.nemo.leftovers import Leftovers
from polar_gym.schema import RuntimeSpec, Session

def session(name):
    return Session(session_id=name, task_id="t", sample_index=0, harness="pi")

leftovers = Leftovers(RuntimeSpec.model_validate({"name": "bubblewrap", "scratch": sys.argv[1]}))
with leftovers.watching(lambda label: label == "left.0") as note:
    note(session("left"))
    note(session("ended"))
with leftovers.watching(lambda _: False) as note:
    note(session("first"))
    note(session("second"))
    print("open", flush=True)
    time.sleep(600)
"""


async def test_all_sandboxes_of_the_open_sessions_are_removed(tmp_path: Path) -> None:
    """Guards against sandboxes that stayed: of a sample's second session, which begins where the first one diverged,
    and of a session that had ended and whose sandbox could not be removed."""
    ended, *others = (scratch_directory.make(f"{name}.0", tmp_path) for name in ("ended", "left", "first", "second"))
    command = (sys.executable, "-c", SERVER, str(tmp_path))
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert await server.stdout.readline() == b"open\n"
    finally:
        server.kill()
        await server.wait()
    async with asyncio.timeout(60):
        while any(other.exists() for other in others):  # noqa: ASYNC110 - another process removes them
            await asyncio.sleep(0.02)
    assert ended.exists(), "it is of no open session"
