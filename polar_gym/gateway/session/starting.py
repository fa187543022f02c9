"""Reads the record that a session starts from, and refuses one of another task or of another harness."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from polar_gym.engines import Engine, EngineError
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
SAME_OWNED = (*SAME, "sampling")
"""Those of a session that goes on with its own record: a branch may sample in another way."""


class RecordError(ConfigError):
    """No session can start from a record."""


class Manifest(Record):
    """The facts of a session that its episode needs when the session's process has died."""

    session: Session
    request: TaskRequest
    engine: EngineInfo
    harness_version: str | None = None
    """None in files of earlier versions."""
    began: float = 0.0
    """When the session was opened, in Unix time; 0 in files of earlier versions."""


def read_recording(request: TaskRequest, harness: Harness, engine: EngineInfo) -> Recording | None:
    """Return the record that a request starts from; None: it starts from none. Blocks.

    Raises `RecordError` where the record is missing or damaged, where it is of another task or harness, and where it is
    the session's own and of another model, sampling or kind of logprobs.
    """
    start = request.start_from
    if start is None:
        return None
    try:
        manifests, calls, seconds = _read(Path(start.record), owned=start.owned)
    except (OSError, ValueError, ValidationError) as error:
        raise RecordError(
            f"start_from.record={start.record!r}: {error}; name the directory of a session, which holds both files"
        ) from error
    for manifest in manifests:
        if (other := _difference(manifest, request, harness, engine, owned=start.owned)) is not None:
            raise RecordError(f"start_from.record={start.record!r}: {other}; start the session without start_from")
    return Recording(
        session_id=manifests[0].session.session_id,
        model=manifests[0].engine.model,
        owned=start.owned,
        volatile={name: re.compile(pattern) for name, pattern in harness.volatile.items()},
        handles=Handles({name: re.compile(pattern) for name, pattern in harness.handles.items()}),
        notice=re.compile(harness.notice) if harness.notice else None,
        live_when_divergent=start.when_divergent == "live",
        calls=sorted(calls, key=lambda call: call.index),
        limit=start.calls,
        seconds=seconds if start.owned else 0.0,
    )


async def check_vocabulary(recording: Recording, engine: Engine) -> None:
    """Raise `RecordError` where a record has ids of another vocabulary than the engine's, which would sample after
    them. A record of the same model is not examined."""
    first = next((call for call in recording.calls if call.parent_id is None and call.frozen is None), None)
    if first is None or recording.model == engine.info.model or engine.info.path == "plain":
        return
    try:
        own = await engine.template(first.messages, first.tools)
    except EngineError as error:
        raise RecordError(
            f"start_from: the record's ids cannot be compared with the engine's: {error.message}"
        ) from error
    if not np.array_equal(own, first.prompt_ids):
        raise RecordError(
            f"start_from: the model {engine.info.model} has other ids for the first prompt than {recording.model}, "
            "which was recorded; branch with a model of the same tokenizer and chat template"
        )


def _difference(
    manifest: Manifest, request: TaskRequest, harness: Harness, engine: EngineInfo, *, owned: bool
) -> str | None:
    """Return why no session of this request can start from a record; None: it can."""
    if manifest.harness_version != harness.version:
        return f"recorded with {request.agent.name} {manifest.harness_version}, and this is {harness.version}"
    for name in SAME_OWNED if owned else SAME:
        if getattr(manifest.request, name) != getattr(request, name):
            return f"recorded with another {name}"
    if owned and manifest.engine.model != engine.model:
        return f"recorded with the model {manifest.engine.model}, and this is {engine.model}"
    modes = {manifest.engine.logprobs_mode, engine.logprobs_mode} - {None}  # None: not known
    if owned and len(modes) > 1:
        return f"recorded with {manifest.engine.logprobs_mode} logprobs, and this engine gives {engine.logprobs_mode}"
    return None


def _read(directory: Path, *, owned: bool) -> tuple[list[Manifest], list[ModelCall], float]:
    """Return the manifest, the calls and the agent's seconds of a recorded session; for its next attempt (`owned`) also
    those of the attempts that it went on with, latest first.

    That attempt may ask for the rest of a record that a resumed session had not asked for again. The rest is then as it
    was delivered first. That record may lie beside its own, brought here with it. A branch has the calls of the session
    alone: the branch counts the calls that the session's episode names as delivered.
    """
    manifest = Manifest.from_json((directory / MANIFEST).read_bytes())
    manifests = [manifest]
    calls = {call.call_id: call for call in read_journal(directory / JOURNAL)}
    new = [call for call in calls.values() if call.replayed is None]
    began, ended = (call.started_at for call in new), (call.started_at + call.duration for call in new)
    seconds = max(ended) - min(began) if new else 0.0  # in records of earlier versions, whose calls have no seconds
    start = manifest.request.start_from
    if owned and start is not None and start.owned:
        before = Path(start.record)
        earlier, record, used = _read(before if before.exists() else directory.parent / before.name, owned=True)
        manifests += earlier
        seconds += used
        calls |= {call.call_id: call for call in record if call.call_id not in calls or call.outcome == "delivered"}
    so_far = (call.agent_seconds for call in new if call.agent_seconds is not None)
    return manifests, list(calls.values()), max(so_far, default=seconds)
