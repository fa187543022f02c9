"""Salvages the sessions of a gateway process that died: makes episodes of their calls, and removes their sandboxes.

The next process on the same state directory does this once, before it takes any session. It must be before, because a
sandbox is named after its session's id, and a later attempt of the session has the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import tenacity

from polar_gym.errors import ConfigError
from polar_gym.gateway.node.state import Key, Manifest, StateDirectory
from polar_gym.gateway.proxy.journal import JournalError, read_journal
from polar_gym.gateway.session.building import build
from polar_gym.runtimes import Runtime, SandboxError
from polar_gym.schema import Artifacts, Episode, Failure, ModelCall, RuntimeSpec, Status

log = logging.getLogger(__name__)

REAP_SECONDS = 60.0
"""How long the process tries to remove orphan sandboxes. A container daemon may still be starting, too."""

DIED = "the gateway process that ran it died"


async def salvage(state: StateDirectory, runtime: Callable[[RuntimeSpec], Runtime]) -> None:
    """Write an episode for every session that has none."""
    left = await asyncio.to_thread(_unfinished, state)
    await reap(left, runtime)
    for key, manifest in left.items():
        episode = await _salvaged(state, key, manifest)
        await asyncio.to_thread(state.finish, key, episode)
    if left:
        log.warning("salvaged %d sessions of a gateway process that died", len(left))


def _unfinished(state: StateDirectory) -> dict[Key, Manifest]:
    return {key: state.read_manifest(key) for key in state.known() if not state.files(key).episode.exists()}


async def reap(left: Mapping[Key, Manifest], runtime: Callable[[RuntimeSpec], Runtime]) -> None:
    """Remove the sandboxes of these sessions."""
    sessions: defaultdict[Runtime, set[str]] = defaultdict(set)
    for key, manifest in left.items():
        try:
            sessions[await asyncio.to_thread(runtime, manifest.request.runtime)].add(key.session_id)
        except (ConfigError, SandboxError, OSError) as error:
            log.error("session %s: its sandbox may be left: %s", key, error)
    for found, session_ids in sessions.items():
        try:
            await _reap_one(found, session_ids)
        except (SandboxError, OSError) as error:
            log.error("sandboxes may be left, of sessions %s: %s", ", ".join(sorted(session_ids)), error)


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((SandboxError, OSError)),
    wait=tenacity.wait_exponential(max=10),
    stop=tenacity.stop_after_delay(REAP_SECONDS),
    reraise=True,
)
async def _reap_one(runtime: Runtime, session_ids: Collection[str]) -> None:
    removed = await runtime.reap(session_ids)
    if removed:
        log.warning("removed %d sandboxes that a gateway process left", removed)


async def _salvaged(state: StateDirectory, key: Key, manifest: Manifest) -> Episode:
    files, session = state.files(key), manifest.session
    calls, damage = await asyncio.to_thread(_read, state, key)
    trajectory, problem = await build(calls, manifest.request.builder)
    said = "; ".join(part for part in (DIED, damage, problem) if part)
    session.status = Status.INTERRUPTED
    session.failure = Failure(stage=Status.RUNNING if calls else Status.QUEUED, kind="interrupted", message=said)
    return Episode(
        session=session,
        request=manifest.request,
        engine=manifest.engine,
        trajectory=trajectory,
        reward=None,
        artifacts=Artifacts(journal=str(files.journal)),
    )


def _read(state: StateDirectory, key: Key) -> tuple[list[ModelCall], str]:
    """Return the calls of a session's journal, and where the journal is damaged (or an empty text)."""
    path = state.files(key).journal
    if not path.exists():
        return [], ""
    try:
        return read_journal(path), ""
    except JournalError as error:
        log.error("session %s: %s", key, error)
        return error.calls, str(error)
