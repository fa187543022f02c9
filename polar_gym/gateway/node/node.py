"""One gateway node: an engine, a proxy, and the stages that its sessions pass through
(`polar_gym.gateway.session.stages`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

from polar_gym.builders import BUILDERS
from polar_gym.config.checking import check_plugin, check_tools
from polar_gym.config.run_config import FrozenConfig, Pools, ScoringConfig
from polar_gym.durable import in_use, remove_tree
from polar_gym.engines import ENGINES, Engine, EngineError, Updating
from polar_gym.engines.replicas import Replicas
from polar_gym.evaluators import EVALUATORS
from polar_gym.gateway.node.open_files import allow_open_files
from polar_gym.gateway.node.state import Key, SessionFiles, StateDirectory
from polar_gym.gateway.node.threads import give_threads
from polar_gym.gateway.node.tool_calls import ToolCalls
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.gateway.proxy.proxy import Proxy, Streaming
from polar_gym.gateway.proxy.scoring import Scoring
from polar_gym.gateway.session.life import Plugins, SessionLife, Surroundings
from polar_gym.gateway.session.sandboxes import Census
from polar_gym.gateway.session.stages import Pool, Stages
from polar_gym.gateway.session.starting import Manifest
from polar_gym.harnesses import HARNESSES
from polar_gym.providers import PROVIDERS
from polar_gym.runtimes import RUNTIMES, Runtime, SandboxError, Serve, agent, check_offered
from polar_gym.schema import Episode, RuntimeSpec, Session, Status, TaskRequest
from polar_gym.spans import Emit, Spans, open_spans
from polar_gym.workspaces.shared import Repositories

log = logging.getLogger(__name__)

KEEP_BYTES = 2**30
"""How much of the records of ended sessions a node without a state directory keeps: a later session may branch them."""
KEEP_SECONDS = 300.0
"""How long it keeps each record, whatever the size: many sessions may end at once, and their records are read
afterwards."""


def ignore_change(session: Session) -> None:
    """Do nothing: for callers that do not watch a session."""


class Node:
    """Runs sessions. `async with Node(...)` starts the engine and leaves nothing behind."""

    def __init__(
        self,
        engine: Engine,
        *,
        cache: Path,
        state: Path | None = None,
        scratch: Path | None = None,
        pools: Pools | None = None,
        streaming: Streaming = "synthetic",
        splice: bool = True,
        keep_reasoning: bool = True,
        scoring: ScoringConfig | None = None,
        frozen: FrozenConfig | None = None,
        spans: Spans = "none",
        name: str = "local",
        unseen: Mapping[str, Path] | None = None,
    ) -> None:
        """`cache`: the directory of harnesses and virtual environments, which runs share. `state`: the directory of
        journals (see `polar_gym.gateway.node.state`); None: the last journals are kept (`KEEP_BYTES`, `KEEP_SECONDS`),
        until the node ends. `scratch`: the directory in which repositories are made; None: the system's temporary
        directory. `scoring`: None: no scores. `frozen`: a second engine for some kinds of calls. `spans`: where each
        session's spans go when it ends. `unseen`: files that no harness may read: key -> path."""
        self.engine = engine
        self.name = name
        self.cache = cache
        self._state = state
        self._scratch_root = scratch
        self._unseen = unseen or {}
        providers = [PROVIDERS.get(name) for name in PROVIDERS.names()]
        self._frozen = [] if frozen is None else [ENGINES.make(frozen.engine)]
        kinds: dict[str, Engine] = {} if frozen is None else dict.fromkeys(frozen.kinds, self._frozen[0])
        self.proxy = Proxy(
            engine, providers, streaming=streaming, splice=splice, keep_reasoning=keep_reasoning, frozen=kinds
        )
        self._scoring = Scoring(scoring or ScoringConfig(share=None), self.proxy.generation)
        self._pools = pools or Pools()
        self.stages = Stages(self._pools)
        self.census = Census()
        self.alone = Pool(1)
        """The place of sessions without confinement."""
        self._spans = spans
        self._emit: Emit | None = None
        self._tool_calls = ToolCalls()
        self._runtimes: dict[str, Runtime] = {}
        self._scratch = Path()
        self._repositories: Repositories
        self._loopback: asyncio.Server | None = None
        self._ended: deque[tuple[Path, int, float]] = deque()
        """Of each ended session: the directory of its record, its size, and the time of the end. The oldest is first.
        Empty where there is a state directory."""
        self._started = contextlib.AsyncExitStack()
        """The parts that must be taken down when the node ends."""

    async def __aenter__(self) -> Node:
        give_threads()
        allow_open_files()
        async with contextlib.AsyncExitStack() as stack:
            for each in (self.engine, *self._scoring.references.values(), *self._frozen):
                await each.start()
                stack.push_async_callback(each.close)
            await self.proxy.probe()
            await self._tool_calls.learn(self.engine)
            if self._spans == "otel":
                self._emit, send_the_rest = open_spans()
                stack.push_async_callback(asyncio.to_thread, send_the_rest)
            self._scratch = Path(tempfile.mkdtemp(prefix="polar-gym-", dir=self._scratch_root))
            stack.push_async_callback(asyncio.to_thread, remove_tree, self._scratch)
            stack.enter_context(in_use(self._scratch))
            self._repositories = Repositories(self._scratch)
            stack.push_async_callback(self._repositories.close)
            stack.push_async_callback(self._close_runtimes)
            stack.push_async_callback(self.census.remove_left)
            removing = asyncio.create_task(self.census.keep_removing())
            stack.callback(removing.cancel)
            loop = asyncio.get_running_loop()
            self._loopback = await loop.create_server(self.proxy.server_for(None), "127.0.0.1", 0)
            stack.callback(self._loopback.close)
            self._started = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._started.aclose()

    async def _close_runtimes(self) -> None:
        for runtime in self._runtimes.values():
            await runtime.close()

    async def set_weights(self, weights: str | Path | Mapping[str, Any], version: str) -> None:
        """Give the engine new weights in place: see `polar_gym.engines.Updating`. Raises `EngineError`."""
        if not isinstance(self.engine, Updating):
            raise EngineError(400, f"engine={self.engine.info.name} takes no weights; use vllm or embedded")
        if not isinstance(weights, Mapping) and not Path(weights).is_dir():
            raise EngineError(400, f"weights={str(weights)!r}: there is no such directory")
        weights = weights if isinstance(weights, Mapping) else Path(weights)
        await self.engine.set_weights(weights, version)
        self.set_weight_version(version)

    def set_weight_version(self, version: str, url: str | None = None) -> None:
        """Set the version of the engine's weights; call this after an update, before the engine goes on.

        Calls are marked with this version, and calls under way with the old and the new one. The engine's own label of
        its weights is kept beside the version. `url`: only the server that listens there was updated; a node without
        such a server does nothing.
        """
        if isinstance(self.engine, Replicas):
            self.engine.name_weights(version, url)
        elif url is None:
            self.engine.weight_version = version
        self._scoring.due = True

    @property
    def url(self) -> str:
        """The address at which clients outside a sandbox reach the proxy."""
        if self._loopback is None:
            raise RuntimeError("the node is not started: use `async with Node(...)`")
        host, port = self._loopback.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    @contextlib.asynccontextmanager
    async def session(
        self,
        request: TaskRequest,
        sample_index: int = 0,
        on_change: Callable[[Session], None] = ignore_change,
        key: Key | None = None,
    ) -> AsyncIterator[SessionLife]:
        """Open a session in state QUEUED. Whatever happens, its sandbox is gone when the context ends."""
        life = self.open_session(request, sample_index, on_change, key)
        try:
            yield life
        except asyncio.CancelledError:
            life.enter(Status.CANCELLED)
            raise
        finally:
            await self.close_session(life)

    def open_session(
        self,
        request: TaskRequest,
        sample_index: int = 0,
        on_change: Callable[[Session], None] = ignore_change,
        key: Key | None = None,
        plugins: Plugins | None = None,
    ) -> SessionLife:
        """Open a session as `session` does, for callers without a `with` block: they must call `close_session`.

        `key`: default: a new key. `plugins`: the plug-ins of the request; default: they are found here.

        Raises `polar_gym.errors.ConfigError` as `find_plugins` does. Nothing was started then.
        """
        plugins = plugins or self.find_plugins(request)
        key = key or Key(uuid.uuid4().hex, 0)
        session = Session(
            session_id=key.session_id,
            attempt=key.attempt,
            task_id=request.task_id,
            sample_index=sample_index,
            harness=request.agent.name,
            node=self.name,
        )
        capture = SessionCapture(
            session_id=session.session_id,
            model_name=request.agent.model_name,
            harness=plugins.harness,
            environment=plugins.environment,
            journal=Journal(StateDirectory(self._state or self._scratch).files(key).journal),
            task_id=request.task_id,
            sample_index=sample_index,
            sampling=request.sampling,
            budget=request.budget,
            scoring=self._scoring,
        )
        self.proxy.add(capture)
        surroundings = Surroundings(
            serve=self._serve,
            proxy=self.proxy,
            cache=self.cache,
            repositories=self._repositories,
            pools=self._pools,
            census=self.census,
        )
        on_change(session)
        return SessionLife(request.model_copy(deep=True), session, plugins, capture, surroundings, on_change)

    async def close_session(self, life: SessionLife) -> None:
        self.proxy.remove(life.capture)
        await life.close()
        files = SessionFiles(life.capture.journal.path.parent)
        if self.census.has_left(life.session.label):
            try:
                await asyncio.to_thread(files.sandboxes_left.touch)
            except OSError as error:
                log.error(
                    "session %s: the next process will not try to remove its sandboxes: %s", life.session.label, error
                )
        if self._state is None:
            size, now = await asyncio.to_thread(files.bytes), time.monotonic()
            self._ended.append((files.directory, size, now))
            while now - self._ended[0][2] > KEEP_SECONDS and sum(size for _, size, _ in self._ended) > KEEP_BYTES:
                await asyncio.to_thread(remove_tree, self._ended.popleft()[0])

    async def rollout(
        self,
        request: TaskRequest,
        sample_index: int = 0,
        on_change: Callable[[Session], None] = ignore_change,
        key: Key | None = None,
    ) -> Episode:
        """Open a session and take it through the pools to its end; return its episode."""
        async with self.session(request, sample_index, on_change, key) as life:
            await self.note(life)
            return await self.conduct(life)

    async def note(self, life: SessionLife) -> None:
        """Write the manifest of a session, without which no later session can start from its record."""
        session, request = life.session, life.request
        manifest = Manifest(
            session=session.model_copy(),
            request=request,
            engine=self.engine.info,
            harness_version=life.capture.harness.version,
            began=life.began,
        )
        state = StateDirectory(self._state or self._scratch)
        await asyncio.to_thread(state.begin, Key(session.session_id, session.attempt), manifest)

    async def conduct(self, life: SessionLife) -> Episode:
        """Take an open session through the stages to its end, or until `life.cancel` ends it; return its episode."""
        work = asyncio.create_task(self._conduct(life))
        try:
            await asyncio.wait({work, life.cancelled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            await asyncio.wait({work})
        if work.cancelled():
            await life.close()
            async with self.stages.postrun.place(life.request.task_id):
                episode = await life.abandon(life.cancelled.result())
        else:
            episode = work.result()
        await self.ended(life, episode)
        return episode

    async def ended(self, life: SessionLife, episode: Episode) -> None:
        """Judge the tool calls of a session that has ended, and send its spans where there is a collector."""
        await self._tool_calls.judge(episode.trajectory, life.capture.calls)
        if self._emit is not None:
            self._emit(episode, life.capture.calls, life.began)

    async def _conduct(self, life: SessionLife) -> Episode:
        """Take a session through the stages; those without confinement one after another, because they share paths."""
        task = life.request.task_id
        async with contextlib.nullcontext() if life.confined else self.alone.place(task):
            return await self.stages.conduct(task, life)

    async def prepare(self, requests: Iterable[TaskRequest]) -> None:
        """Fetch the images of these tasks, in order, before their sessions ask for them.

        An image that cannot be fetched is only logged: its sessions fail, and say why.
        """
        for spec in (request.runtime for request in requests):
            if spec.image is not None:
                try:
                    await self.runtime(spec).prepare([spec.image])
                except SandboxError as error:
                    log.warning("%s", error)

    def find_plugins(self, request: TaskRequest) -> Plugins:
        """Return the plug-ins of a request. May block.

        Raises `ConfigError` for an unknown plug-in, for options that a plug-in does not take, and as `check_unseen`.
        """
        check_plugin("agent", HARNESSES, request.agent)
        check_plugin("builder", BUILDERS, request.builder)
        evaluator_options = check_plugin("evaluator", EVALUATORS, request.evaluator)
        check_tools(request.agent, request.evaluator, evaluator_options)
        self.check_unseen([request.runtime])
        return Plugins(
            harness=HARNESSES.get(request.agent.name),
            evaluator=EVALUATORS.get(request.evaluator.name)(evaluator_options),
            runtime=self.runtime(request.runtime),
        )

    def check_unseen(self, specs: Iterable[RuntimeSpec]) -> None:
        """Raise `ConfigError` where sandboxes would show their workspace's source, or a file that none may show. The
        samples of a task are checked once."""
        distinct = {
            (each.name, repr(each.options), each.image, each.scope, each.workspace.source): each for each in specs
        }
        for spec in distinct.values():
            source = spec.workspace.source
            own = {} if source is None else {"runtime.workspace.source": Path(source)}
            agent.check_unseen(spec, self.runtime(spec), {**self._unseen, **own})

    def runtime(self, spec: RuntimeSpec) -> Runtime:
        """Return the runtime for these options, the same for all sessions. May block the first time.

        Raises `ConfigError` where the runtime cannot give the sandboxes that are asked for.
        """
        options = check_plugin("runtime", RUNTIMES, spec)
        key = f"{spec.name}:{options!r}"
        if key not in self._runtimes:
            made = RUNTIMES.get(spec.name)(options)
            self._runtimes.setdefault(key, made)  # threads that look at once all get the first one made
        check_offered(spec, self._runtimes[key])
        return self._runtimes[key]

    def _serve(self, capture: SessionCapture) -> Serve:
        async def serve(listener: socket) -> asyncio.Server:
            loop = asyncio.get_running_loop()
            factory = self.proxy.server_for(capture)
            if listener.family == AF_UNIX:
                return await loop.create_unix_server(factory, sock=listener)
            return await loop.create_server(factory, sock=listener)

        return serve
