"""Reads the record that a session starts from, and refuses one of another task or of another harness."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.harnesses import Harness
from polar_gym.record import Record
from polar_gym.schema import EngineInfo, ModelCall, Session, TaskRequest
from polar_gym.splicing.handles import Handles
from polar_gym.splicing.recording import Recording

MANIFEST, JOURNAL = "manifest.json", "calls.jsonl"
SAME = ("task_id", "instruction", "runtime", "agent")
"""The fields of a request that must be those of the record."""


class RecordError(ConfigError):
    """No session can start from a record."""


class Manifest(Record):
    """The facts of a session that its episode needs when the session's process has died."""

    session: Session
    request: TaskRequest
    engine: EngineInfo
    harness_version: str | None = None
    """None in files of earlier versions."""


def read_recording(request: TaskRequest, harness: Harness) -> Recording | None:
    """Return the record that a request starts from; None: it starts from none. Blocks.

    Raises `RecordError` where the record is missing or damaged, and where it is of another task or harness.
    """
    start = request.start_from
    if start is None:
        return None
    try:
        manifest, calls, seconds = _read(Path(start.record))
    except (OSError, ValueError, ValidationError) as error:
        raise RecordError(
            f"start_from.record={start.record!r}: {error}; name the directory of a session, which holds both files"
        ) from error
    if manifest.harness_version != harness.version:
        raise RecordError(
            f"start_from.record={start.record!r}: recorded with {request.agent.name} {manifest.harness_version}, and "
            f"this is {harness.version}; start the session without start_from"
        )
    for name in SAME:
        if getattr(manifest.request, name) != getattr(request, name):
            raise RecordError(
                f"start_from.record={start.record!r}: its task has another {name}; start the session without start_from"
            )
    return Recording(
        session_id=manifest.session.session_id,
        owned=start.owned,
        volatile={name: re.compile(pattern) for name, pattern in harness.volatile.items()},
        handles=Handles({name: re.compile(pattern) for name, pattern in harness.handles.items()}),
        notice=re.compile(harness.notice) if harness.notice else None,
        live_when_divergent=start.when_divergent == "live",
        calls=sorted(calls, key=lambda call: call.index),
        limit=start.calls,
        seconds=seconds if start.owned else 0.0,
    )


def _read(directory: Path) -> tuple[Manifest, list[ModelCall], float]:
    """Return manifest, calls and seconds of a recorded session. A resumed session that ended before it had asked for
    all of its own record still has the rest of that record, as it was delivered first. That record may lie beside its
    own, brought here with it."""
    manifest = Manifest.from_json((directory / MANIFEST).read_bytes())
    calls = {call.call_id: call for call in read_journal(directory / JOURNAL)}
    new = [call for call in calls.values() if call.replayed is None]
    began, ended = (call.started_at for call in new), (call.started_at + call.duration for call in new)
    seconds = max(ended) - min(began) if new else 0.0
    start = manifest.request.start_from
    if start is not None and start.owned:
        before = Path(start.record)
        _, record, earlier = _read(before if before.exists() else directory.parent / before.name)
        seconds += earlier
        calls |= {call.call_id: call for call in record if call.call_id not in calls or call.outcome == "delivered"}
    return manifest, list(calls.values()), seconds
