"""A peer that speaks the node's side of `polar_gym.protocol` over real HTTP, and runs nothing.

Tests decide how each session ends. For whole nodes see `test_service_whole.py`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from polar_gym.http.edge import answer_list
from polar_gym.protocol import (
    Delivery,
    DeliveryAnswer,
    Dispatch,
    ErrorAnswer,
    Generation,
    GenerationAnswer,
    Heartbeat,
    HeartbeatAnswer,
    StageCounts,
    Transcript,
    Weights,
)
from polar_gym.schema import (
    EngineInfo,
    Episode,
    Failure,
    Fidelity,
    HarnessSpec,
    RuntimeSpec,
    Session,
    Status,
    TaskRequest,
    Timing,
    Trace,
    Trajectory,
)
from tests.support.listening import listen, stop_listening

ENGINE = EngineInfo(name="none", model="policy", max_model_len=1024)


def make_request(task_id: str, **fields: Any) -> TaskRequest:
    return TaskRequest(
        task_id=task_id,
        instruction="do it",
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec.model_validate({"name": "command", "command": "true"}),
        **fields,
    )


def episode_of(order: Dispatch, *, reward: float | None = 1.0, **session: Any) -> Episode:
    """Return an episode of the order. Without a reward, pass a `failure` or a `status` too."""
    ids = np.arange(3, dtype=np.int32)
    trace = Trace(
        trace_id="t",
        session_id=order.session_id,
        prompt_ids=ids,
        response_ids=ids,
        loss_mask=np.ones(3, dtype=np.int8),
        logprobs=np.zeros(3, dtype=np.float32),
        messages=[],
        call_ids=["c"],
    )
    return Episode(
        session=Session(
            **{
                "session_id": order.session_id,
                "task_id": order.request.task_id,
                "sample_index": order.sample_index,
                "attempt": order.attempt,
                "harness": order.request.agent.name,
                "status": Status.COMPLETED if reward is not None else Status.ERROR,
                "timing": Timing(running=1.0),
                **session,
            }
        ),
        request=order.request,
        engine=ENGINE,
        trajectory=Trajectory(
            builder="none", traces=[trace], fidelity=Fidelity(sampled_tokens=3, trainable_tokens=3, calls=1, traces=1)
        ),
        reward=reward,
    )


def failed(kind: str = "runtime_error") -> Failure:
    return Failure(stage=Status.RUNNING, kind=kind, message="broke")


class PeerNode:
    """`async with PeerNode(server_url, key)`: it has registered, and holds what it is given until the test ends it."""

    def __init__(
        self, server: str, key: str | None = None, *, name: str = "a", engine: str = "e", run: int = 4
    ) -> None:
        self.server, self.name, self.engine_key = server, name, engine
        self.places = StageCounts(init=0, ready=0, run=run, postrun=run)
        self.incarnation = uuid.uuid4().hex
        self.held: dict[str, Dispatch] = {}
        self.statuses: dict[str, Status] = {}
        self.versions: dict[str, str | None] = {}
        self.transcripts: list[Transcript] = []
        self.cancelled: list[tuple[str, int]] = []
        self.orders: list[Generation | Weights] = []
        self.refuse_with: tuple[int, str] | None = None
        self.refused = asyncio.Event()
        self.changed = asyncio.Condition()
        self.weight_version: str | None = None
        self.engines: dict[str, str | None] = {}
        """The servers of its engine, with the version of each."""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> PeerNode:
        app = web.Application()
        app.router.add_put("/v1/sessions/{session_id}/{attempt}", self._put)
        app.router.add_delete("/v1/sessions/{session_id}/{attempt}", self._delete)
        app.router.add_post("/v1/generation", self._generation)
        app.router.add_post("/v1/weights", self._weights)
        app.router.add_get("/v1/transcripts", self._transcripts)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._listening = await listen(self._runner)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.http = aiohttp.ClientSession(headers=self._headers)
        await self.beat()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.http.close()
        await stop_listening(self._runner, self._listening)

    # What it does -----------------------------------------------------------------------------------------------------

    async def beat(self) -> HeartbeatAnswer:
        held = list(self.held.values())
        heartbeat = Heartbeat(
            node=self.name,
            url=self.url,
            incarnation=self.incarnation,
            engine=ENGINE,
            engine_key=self.engine_key,
            places=self.places,
            held=StageCounts(run=len(held)),
            sessions=[
                Session(
                    session_id=order.session_id,
                    task_id=order.request.task_id,
                    sample_index=order.sample_index,
                    attempt=order.attempt,
                    harness="command",
                    node=self.name,
                    status=self.statuses.get(order.session_id, Status.RUNNING),
                    weight_version=self.versions.get(order.session_id),
                )
                for order in held
            ],
        )
        answer = HeartbeatAnswer.from_json(await self._post("heartbeat", heartbeat.to_json()))
        for session_id in answer.cancel:
            self.held.pop(session_id, None)
        return answer

    async def restart(self) -> None:
        """Forget everything and become a new incarnation, as a process that was killed and started again."""
        self.held.clear()
        self.incarnation = uuid.uuid4().hex
        await self.beat()

    async def take(self, count: int = 1) -> list[Dispatch]:
        """Return the orders that the node holds, once there are so many."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.held) >= count)
        return list(self.held.values())

    async def deliver(self, episode: Episode, attempt: int) -> bool:
        """Deliver the episode, and return whether it was accepted."""
        body = Delivery(attempt=attempt, episode=episode).to_json()
        answer = DeliveryAnswer.from_json(await self._post("episodes", body))
        self.held.pop(episode.session.session_id, None)
        return answer.accepted

    async def finish(self, order: Dispatch, **fields: Any) -> bool:
        accepted = await self.deliver(episode_of(order, **fields), order.attempt)
        await self.beat()
        return accepted

    async def work(self) -> None:
        """Finish every session that arrives, until cancelled. Wait for a server that is away."""
        while True:
            try:
                for order in list(self.held.values()):
                    await self.deliver(episode_of(order, weight_version=self.weight_version), order.attempt)
                await self.beat()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    async def _post(self, what: str, body: bytes) -> bytes:
        async with self.http.post(f"{self.server}/v1/nodes/{self.name}/{what}", data=body) as response:
            answer = await response.read()
            if response.status != 200:
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=answer.decode()
                )
            return answer

    # What it is told --------------------------------------------------------------------------------------------------

    async def _put(self, request: web.Request) -> web.Response:
        order = Dispatch.from_json(await request.read())
        if self.refuse_with is not None:
            status, why = self.refuse_with
            self.refused.set()
            return web.Response(status=status, body=ErrorAnswer(error=why).to_json())
        async with self.changed:
            self.held[order.session_id] = order
            self.versions[order.session_id] = self.weight_version
            self.changed.notify_all()
        return web.Response(body=b"{}")

    async def _delete(self, request: web.Request) -> web.Response:
        session_id, attempt = request.match_info["session_id"], int(request.match_info["attempt"])
        async with self.changed:
            self.cancelled.append((session_id, attempt))
            self.held.pop(session_id, None)
            self.changed.notify_all()
        return web.Response(status=204)

    async def _generation(self, request: web.Request) -> web.Response:
        order = Generation.from_json(await request.read())
        self.orders.append(order)
        return web.Response(body=GenerationAnswer(paused=order.paused, in_flight=0).to_json())

    async def _weights(self, request: web.Request) -> web.Response:
        order = Weights.from_json(await request.read())
        self.orders.append(order)
        self.weight_version = order.version
        answer = GenerationAnswer(paused=False, in_flight=0, weight_version=order.version, engines=self.engines)
        return web.Response(body=answer.to_json())

    async def _transcripts(self, request: web.Request) -> web.Response:
        return answer_list(self.transcripts)

    async def cancellation(self, count: int = 1) -> list[tuple[str, int]]:
        """Return the attempts that the node was told to cancel, once there are so many."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.cancelled) >= count)
        return self.cancelled
