"""Salvages the sessions of a gateway process that died: makes episodes of their calls, and removes their sandboxes.

The next process on the same state directory does this once, before it takes any session. It removes the sandboxes of
the attempts in that directory only: a later attempt of a session may run on another node of the same machine.
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
    """Remove the sandboxes that are left, and write an episode for every session that has none. Sessions that no
    process took are removed."""
    await asyncio.to_thread(state.remove_unbegun)
    left, ended = await asyncio.to_thread(_left, state)
    await reap(state, left | ended, runtime)
    for key, manifest in left.items():
        episode = await _salvaged(state, key, manifest)
        await asyncio.to_thread(state.finish, key, episode)
    if left:
        log.warning("salvaged %d sessions of a gateway process that died", len(left))


def _left(state: StateDirectory) -> tuple[dict[Key, Manifest], dict[Key, Manifest]]:
    """Return the sessions without an episode, and those with one whose sandboxes could not be removed. Set aside those
    of the former that cannot be read: no other session is to wait for them."""
    left, ended = dict[Key, Manifest](), dict[Key, Manifest]()
    for key in state.known():
        files = state.files(key)
        running, reaped = not files.episode.exists(), not files.sandboxes_left.exists()
        if not running and reaped:
            continue
        try:
            (left if running else ended)[key] = state.read_manifest(key)
        except ValueError as error:
            if running:
                state.set_aside(key, error)
            else:
                log.error("session %s: its sandbox may be left: %s", key, error)
    return left, ended


async def reap(state: StateDirectory, left: Mapping[Key, Manifest], runtime: Callable[[RuntimeSpec], Runtime]) -> None:
    """Remove the sandboxes of these sessions. Those that cannot be removed are noted for the next process."""
    sessions: defaultdict[Runtime, set[Key]] = defaultdict(set)
    failed: set[Key] = set()
    for key, manifest in left.items():
        try:
            sessions[await asyncio.to_thread(runtime, manifest.request.runtime)].add(key)
        except (ConfigError, SandboxError, OSError) as error:
            failed.add(key)
            log.error("session %s: its sandbox may be left: %s", key, error)
    for found, keys in sessions.items():
        try:
            await _reap_one(found, [str(key) for key in sorted(keys)])
        except (SandboxError, OSError) as error:
            failed |= keys
            log.error("sandboxes may be left, of sessions %s: %s", ", ".join(map(str, sorted(keys))), error)
    await asyncio.to_thread(_note, state, left, failed)


def _note(state: StateDirectory, left: Collection[Key], failed: Collection[Key]) -> None:
    for key in left:
        mark = state.files(key).sandboxes_left
        if key in failed:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)


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
