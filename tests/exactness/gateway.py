"""The audited process: a node of the package whose sessions are opened and ended by lines on standard input.

    python -m tests.exactness.gateway --engine URL --state DIRECTORY [--path generate] [--record yes]

A line is JSON, and so is each answer: `{"open": harness}` opens a session and answers with its id and key,
`{"close": session}` ends it and writes its episode as a node does, `{"version": text}` sets the version of the weights.
At its start the process salvages the sessions that an earlier one with the same directory has left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.salvage import salvage
from polar_gym.gateway.node.state import Key, Manifest, StateDirectory
from polar_gym.gateway.session.building import build
from polar_gym.gateway.session.life import SessionLife
from polar_gym.schema import Artifacts, Episode, HarnessSpec, RuntimeSpec, Sampling, Status, TaskRequest


class NoSandboxes:
    """The runtime of sessions whose harness is a client outside of a sandbox: none is left behind."""

    async def reap(self, session_ids: Any) -> int:
        return 0


class Audited:
    """The sessions of the node."""

    def __init__(self, node: Node, state: StateDirectory) -> None:
        self._node = node
        self._state = state
        self._lives: dict[str, SessionLife] = {}

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "open" in order:
            return await self._open(order["open"])
        if "version" in order:
            self._node.set_weight_version(order["version"])
            return {}
        return await self._close(order["close"])

    async def _open(self, harness: str) -> dict[str, Any]:
        request = TaskRequest(
            task_id="audit",
            instruction="x",
            runtime=RuntimeSpec(name="bubblewrap"),
            agent=HarnessSpec(name=harness, model_name="policy"),
            sampling=Sampling(top_p=0.95) if self._node.engine.info.records else Sampling(),
        )
        key = Key(uuid.uuid4().hex, 0)
        life = self._node.open_session(request, key=key)
        life.capture.running = True
        manifest = Manifest(session=life.session, request=request, engine=self._node.engine.info)
        await asyncio.to_thread(self._state.begin, key, manifest)
        self._lives[key.session_id] = life
        return {"session": key.session_id, "key": life.capture.key}

    async def _close(self, session_id: str) -> dict[str, Any]:
        life = self._lives.pop(session_id)
        await life.capture.end()
        trajectory, problem = await build(life.capture.calls, life.request.builder)
        life.session.status = Status.COMPLETED
        episode = Episode(
            session=life.session,
            request=life.request,
            engine=self._node.engine.info,
            trajectory=trajectory,
            reward=None,
            artifacts=Artifacts(journal=str(life.capture.journal.path)),
        )
        await asyncio.to_thread(self._state.finish, Key(session_id, 0), episode)
        await self._node.close_session(life)
        return {"problem": problem}


async def serve(options: argparse.Namespace) -> None:
    state = StateDirectory(options.state)
    lock = await asyncio.to_thread(state.lock)
    await salvage(state, lambda _: NoSandboxes())  # pyright: ignore[reportArgumentType]
    engine = VllmEngine(
        VllmOptions(
            url=options.engine,
            path=options.path,
            record=["routed_experts", "sampling_mask"] if options.record else [],
            patience_seconds=options.patience,
        )
    )
    async with Node(engine, cache=options.state, state=options.state, streaming=options.streaming) as node:
        audited = Audited(node, state)
        print(json.dumps({"url": node.url}), flush=True)  # noqa: T201
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        answering: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(_answer(audited, json.loads(line)))
            answering.add(task)
            task.add_done_callback(answering.discard)
    lock.close()


async def _answer(audited: Audited, order: dict[str, Any]) -> None:
    try:
        answer = await audited.obey(order)
    except Exception as error:  # noqa: BLE001 - the driver tells it
        answer = {"problem": repr(error)}
    print(json.dumps({"number": order["number"], **answer}), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--path", default="auto")
    parser.add_argument("--record", help="any text: record the sampler's choices")
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--streaming", default="real")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
