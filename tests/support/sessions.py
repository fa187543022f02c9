"""Task requests, nodes and sessions for tests, whose harness is a few lines of the test or the test itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar_gym.engines import Engine
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.session.starting import read_recording
from polar_gym.harnesses import HARNESSES
from polar_gym.schema import HarnessSpec, ModelCall, RuntimeSpec, TaskRequest

INFO = EmbeddedEngine(EmbeddedOptions()).info

ASK = """
import json, os, sys, urllib.request
def ask(**more):
    body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}], **more}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return urllib.request.urlopen(request).read()
"""


def asking(rest: str = "ask()") -> HarnessSpec:
    """Return a harness that runs these lines of Python, in which `ask()` is a call of the policy."""
    return HarnessSpec.model_validate({"name": "command", "command": ["python3", "-c", f"{ASK}\n{rest}"]})


def task(**fields: Any) -> TaskRequest:
    return TaskRequest(
        **{"task_id": "t", "instruction": "x", "runtime": RuntimeSpec(name="bubblewrap"), "agent": asking(), **fields}
    )


def node(tmp_path: Path, **options: Any) -> Node:
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="word " * 20)], **options))
    return Node(engine, cache=tmp_path / "cache", state=tmp_path / "state")


REQUEST = TaskRequest(
    task_id="t", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi")
)


def listing_engine(delay_seconds: float = 0.0) -> EmbeddedEngine:
    """Return an engine whose policy lists the files twice and then ends."""
    script = Script(commands=["ls", "ls -a"], final_message="Done.")
    return EmbeddedEngine(EmbeddedOptions(scripts=[script], delay_seconds=delay_seconds))


@asynccontextmanager
async def running_session(
    engine: Engine, directory: Path, request: TaskRequest = REQUEST, **options: Any
) -> AsyncIterator[tuple[Node, SessionCapture]]:
    """Start a node with one running session, whose harness is the test."""
    node = Node(engine, cache=directory / "cache", state=directory / "state", **options)
    async with node, node.session(request) as life:
        life.capture.running = True
        yield node, life.capture


async def played(
    directory: Path,
    request: TaskRequest,
    harness: Callable[[Node, SessionCapture], Awaitable[Any]],
    engine: EmbeddedEngine | None = None,
    **options: Any,
) -> tuple[list[ModelCall], Any, Path]:
    """Run a session of a harness, which is a function here, from its record where the request names one. Return its
    calls, the harness's result, and the session's directory."""
    node = Node(engine or listing_engine(), cache=directory / "cache", state=directory / "state", **options)
    async with node, node.session(request) as life:
        await node.note(life)
        recording = await asyncio.to_thread(read_recording, request, HARNESSES.get(request.agent.name), INFO)
        if recording is not None:
            life.capture.start_from(recording)
        life.capture.running = True
        result = await harness(node, life.capture)
        await life.capture.end()
        return life.capture.calls, result, life.capture.journal.path.parent
