"""Runs rollouts for an agent server: takes rows, returns answers, and raises nothing.

The engine serves the run's policy. A run with several data-parallel replicas names several URLs, and each replica gets
one node. A session stays on its node, so that its prefix stays in that replica's cache. The nodes start with the first
row, not earlier. Therefore a server whose engine is down still answers, with masked samples.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from polar_gym.config.loading import load_config
from polar_gym.config.run_config import Pools, RunConfig
from polar_gym.engines import EngineError
from polar_gym.errors import ConfigError, explain
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.state import Key, StateDirectory
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.nemo.leftovers import Leftovers
from polar_gym.nemo.verified import Mask, Row, verified, verified_episode
from polar_gym.registry import Options
from polar_gym.schema import Episode, PluginSpec, Sampling, Session, StartFrom, TaskRequest
from polar_gym.tasks import Task
from polar_gym.tasks.rows import FileSelection, to_task

log = logging.getLogger(__name__)

SAMPLING_FIELDS = ("temperature", "top_p")
"""The fields of a row's `responses_create_params` that count: NeMo RL sets them to the values that it trains with."""

MAPPINGS = ("responses_create_params", "verifier_metadata", "instance_config")
"""The fields of a row that must be mappings."""


class AgentSettings(Options):
    """The settings in an agent server's YAML."""

    policy_base_url: str | list[str] | None = None
    """The URL of the policy; NeMo RL gives a list, one URL per data-parallel replica."""
    policy_model_name: str | None = None
    policy_api_key: str | None = None
    concurrency: int = Field(default=16, gt=0)
    """How many harnesses may run at once, over all replicas; each has a like share, rounded up."""
    resume: bool = False
    """Whether a row that an earlier process of this server had begun goes on with its record when the row comes again:
    with `polar.rollout.state`, a directory of this run alone."""
    recipe: str | None = None
    polar: dict[str, Any] = Field(default_factory=dict)
    """Groups and sections of a run's config (`RunConfig`): `harness: codex`, `runtime: docker`, `tasks: {...}`."""


def check_others(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for a key that was meant for us, because NeMo Gym would ignore it in silence.

    The other keys belong to NeMo Gym and differ by version.
    """
    for key in keys:
        if key in RunConfig.model_fields:
            raise ConfigError(f"{key}: belongs to polar-gym's config: write polar.{key}")
        if meant := difflib.get_close_matches(key, AgentSettings.model_fields, n=1, cutoff=0.8):
            raise ConfigError(f"{key}: unknown key; {meant[0]} is meant?")


class RowError(ValueError):
    """A row that cannot be run."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = f"polar:{kind}"


@dataclass(frozen=True, slots=True)
class _Machinery:
    """The parts that the first row starts: the tasks by id, a node for each replica, and the process that removes the
    sandboxes of a killed server."""

    tasks: dict[str, Task]
    nodes: list[Node]
    leftovers: Leftovers
    begun: dict[tuple[str, int], list[Key]]
    """Task and sample -> sessions that an earlier process began and did not end."""
    day: date | None
    """The day that the harness of the first recorded session was told; None: no day was told."""
    stop: AsyncExitStack


class Rollouts:
    """The rollouts of one server process."""

    def __init__(self, settings: AgentSettings) -> None:
        """Check the settings; start nothing yet. Raises `polar_gym.errors.ConfigError`."""
        self.configs = run_configs(settings)
        state = self.configs[0].rollout.state
        if settings.resume and state is None:
            raise ConfigError("resume=true: needs polar.rollout.state, a directory that keeps the records of this run")
        self._records = StateDirectory(state) if settings.resume and state is not None else None
        self._starting: asyncio.Task[_Machinery] | None = None
        self._turns = itertools.count()
        self._open = Counter[int]()
        """The number of a node -> its rows."""
        self._unnumbered: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Task -> the numbers of rows that come without one: else all would have the same seeds."""

    async def run(self, row: Row) -> dict[str, Any]:
        """Return one episode as a verify response. Any failure becomes a masked sample: an error would end the run."""
        try:
            machinery = await self._machinery()
            request, index = self._request(machinery, row), _sample_index(row)
            if index is None:  # a row that may go on with a record is known by its number
                index = next(self._unnumbered[request.task_id]) if self._records is None else 0
            with (
                self._place(len(machinery.nodes)) as place,
                machinery.leftovers.watching(machinery.nodes[place].census.has_left) as note,
            ):
                episode = await self._episode(machinery, machinery.nodes[place], request, index, note)
            return await asyncio.to_thread(self._answer, row, episode)
        except Exception as error:  # noqa: BLE001 - /run must not raise: one broken session would end all others
            return verified(row, _why(error), response_id=uuid.uuid4().hex, created_at=time.time())

    @contextmanager
    def _place(self, count: int) -> Iterator[int]:
        """Give the number of the node with the fewest rows; of several, the next one in turn. The row is counted until
        the block ends."""
        turn = next(self._turns)
        place = min(range(count), key=lambda each: (self._open[each], (each - turn) % count))
        self._open[place] += 1
        try:
            yield place
        finally:
            self._open[place] -= 1

    async def _episode(
        self, machinery: _Machinery, node: Node, request: TaskRequest, index: int, note: Callable[[Session], None]
    ) -> Episode:
        """Return the episode of a row, which goes on with the record of an earlier process where one fits."""
        episode = None
        if self._records is not None and (keys := machinery.begun.get((request.task_id, index))):
            start = StartFrom(record=str(self._records.files(keys.pop()).directory.absolute()), owned=True)
            own = request.model_copy(update={"start_from": start})
            episode = await self._to_its_end(node, own, index, note)  # under a new id: old sandboxes are removed
        if episode is None or (episode.session.failure is not None and episode.session.failure.kind == "diverged"):
            episode = await self._to_its_end(node, request, index, note)
        return episode

    async def _to_its_end(
        self, node: Node, request: TaskRequest, index: int, note: Callable[[Session], None]
    ) -> Episode:
        """Return the episode of a session, and have its record say that it has ended: no row goes on with it."""
        episode = await node.rollout(request, index, note)
        if self._records is not None:
            key = Key(episode.session.session_id, episode.session.attempt)
            await asyncio.to_thread(self._records.finish, key, episode)
        return episode

    async def close(self) -> None:
        """Stop the nodes, so that no sandbox is left. May be called twice."""
        starting, self._starting = self._starting, None
        if starting is not None and (await asyncio.wait({starting})) and not starting.exception():
            await starting.result().stop.aclose()

    async def _machinery(self) -> _Machinery:
        """Start the nodes and load the tasks, once.

        All rows that come during a start wait for the same attempt. After a failed attempt the next row tries again.
        """
        failed = self._starting is not None and self._starting.done() and self._starting.exception() is not None
        if self._starting is None or failed:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Machinery:
        tasks = await asyncio.to_thread(load_tasks, self.configs[0])
        async with AsyncExitStack() as stack:
            records = self._records
            if records is not None:
                stack.enter_context(await asyncio.to_thread(records.lock, "polar.rollout.state"))
            leftovers = await asyncio.to_thread(Leftovers, self.configs[0].runtime)
            stack.push_async_callback(asyncio.to_thread, leftovers.close)
            nodes = [make_node(config, tasks, scratch=leftovers.directory) for config in self.configs]
            started = [await stack.enter_async_context(node) for node in nodes]
            begun, day = ({}, None) if records is None else await asyncio.to_thread(_begun, records)
            by_id = {task.instance_id: task for task in tasks}
            return _Machinery(by_id, started, leftovers, begun, day, stack.pop_all())

    def _request(self, machinery: _Machinery, row: Row) -> TaskRequest:
        for key in MAPPINGS:
            if not isinstance(row.get(key) or {}, Mapping):
                raise RowError("invalid_row", f"{key}={row[key]!r}: expected a mapping")
        config = self.configs[0].on(machinery.day)  # replicas differ in the engine only
        if _grades_rows(config.evaluator):
            request = make_request(config, _own_task(row))
            return request.model_copy(update={"sampling": _sampling(request.sampling, row)})
        name = (row.get("verifier_metadata") or {}).get("instance_id")
        if not isinstance(name, str) or name not in machinery.tasks:
            known = list(machinery.tasks)
            shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
            raise RowError(
                "unknown_task", f"verifier_metadata.instance_id={name!r}: not in polar.tasks; known: {shown}"
            )
        request = make_request(config, machinery.tasks[name])
        return request.model_copy(update={"sampling": _sampling(request.sampling, row)})

    def _answer(self, row: Row, episode: Episode) -> dict[str, Any]:
        assert episode.artifacts.journal is not None
        return verified_episode(row, episode, read_journal(Path(episode.artifacts.journal)))


def _begun(records: StateDirectory) -> tuple[dict[tuple[str, int], list[Key]], date | None]:
    """Return the sessions that have not ended, and with whose record no other session went on; and the day that the
    first of all sessions was told."""
    known = {key: records.read_manifest(key) for key in records.known()}
    starts = [manifest.request.start_from for manifest in known.values()]
    used = {Path(start.record).name for start in starts if start is not None}
    begun: dict[tuple[str, int], list[Key]] = {}
    for key, manifest in known.items():
        if records.files(key).ending() is None and str(key) not in used:
            begun.setdefault((manifest.session.task_id, manifest.session.sample_index), []).append(key)
    first = min(known.values(), key=lambda manifest: manifest.began, default=None)
    return begun, None if first is None else first.request.agent.today


_OF_RUNS = {
    "num_samples": "each row is one session",
    "output": "the rows' answers hold the episodes",
    "metrics": "the trainer logs its own figures",
}
"""Keys of `polar.rollout` that have no effect."""


def run_configs(settings: AgentSettings) -> list[RunConfig]:
    """Return a config for each replica. Raises `polar_gym.errors.ConfigError`."""
    engine, pools = settings.polar.get("engine", {}), settings.polar.get("pools", {})
    if not isinstance(engine, str | Mapping):
        raise ConfigError(f"polar.engine={engine!r}: expected a mapping or a name")
    if not isinstance(pools, Mapping):
        raise ConfigError(f"polar.pools={pools!r}: expected a mapping")
    rollout = settings.polar.get("rollout") or {}
    for key, why in _OF_RUNS.items():
        if isinstance(rollout, Mapping) and key in rollout:
            raise ConfigError(f"polar.rollout.{key}={rollout[key]!r}: has no effect here: {why}; leave it out")
    if "run" in pools:
        raise ConfigError(f"polar.pools.run={pools['run']!r}: set concurrency={pools['run']!r} instead")
    engine = {"name": engine} if isinstance(engine, str) else {"name": "vllm", **engine}
    if engine["name"] != "vllm" or "url" in engine:
        return [_config(settings, engine, replicas=1)]
    urls = settings.policy_base_url or []
    urls = [urls] if isinstance(urls, str) else urls
    if not urls:
        raise ConfigError(
            "policy_base_url: is required, unless polar.engine names another engine than the policy model"
        )
    policy = {"model": settings.policy_model_name, "api_key": settings.policy_api_key}
    return [_config(settings, {"url": url, **policy, **engine}, len(urls)) for url in urls]


def _config(settings: AgentSettings, engine: dict[str, Any], replicas: int) -> RunConfig:
    """Return a replica's config, with its share of the pools: all replicas' nodes are on this machine."""
    pools = {**settings.polar.get("pools", {}), "run": settings.concurrency}
    config = load_config(settings.recipe, settings={**settings.polar, "engine": engine, "pools": pools})
    shares = {name: -(-places // replicas) for name, places in config.pools.model_dump().items()}
    return config.model_copy(update={"pools": Pools(**shares)})


def _grades_rows(evaluator: PluginSpec) -> bool:
    """Return whether an evaluator, or a component of one, grades rows by their environment's server."""
    parts = evaluator.options.get("components")
    known = [PluginSpec.model_validate(part) for part in parts.values()] if isinstance(parts, Mapping) else []
    return evaluator.name == "nemo_gym" or any(map(_grades_rows, known))


def _own_task(row: Row) -> Task:
    """Return the task that a row for a resources server is. Raises `RowError`."""
    own = {key: value for key, value in row.items() if not key.startswith("_")}
    try:
        return to_task("row", own, None, FileSelection())
    except ValueError as error:
        raise RowError("invalid_row", str(error)) from error


def _sample_index(row: Row) -> int | None:
    """Return the number of a row in its group; None where the row has none. NeMo Gym's collector tells it; NeMo RL
    numbers the rows of a batch, and so those of a group differ, too."""
    known = (row.get(name) for name in ("_ng_rollout_index", "_rowidx"))
    return next((int(index) for index in known if index is not None), None)


def _sampling(sampling: Sampling, row: Row) -> Sampling:
    asked = row.get("responses_create_params") or {}
    if asked.get("max_output_tokens") is not None:
        _tell_of_no_effect("max_output_tokens")
    changes = {name: asked[name] for name in SAMPLING_FIELDS if asked.get(name) is not None}
    try:
        return Sampling.model_validate({**sampling.model_dump(), **changes})
    except ValidationError as error:
        raise RowError("invalid_row", f"responses_create_params: {explain(error, Sampling)}") from error


@cache
def _tell_of_no_effect(field: str) -> None:
    """Warn, once in this process, of a field of a row that changes nothing."""
    log.warning("responses_create_params.%s of a row has no effect: the harness asks for its answers' length", field)


def _why(error: Exception) -> Mask:
    match error:
        case RowError():
            return Mask(error.kind, str(error))
        case ConfigError():
            return Mask("polar:config_error", str(error))
        case EngineError():
            return Mask("provider_unavailable", error.message)
        case _:
            log.error("a row failed with an unexpected error", exc_info=error)
            return Mask("polar:internal_error", repr(error))
