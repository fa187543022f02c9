"""`polar-gym verify`: does every trace hold what the model saw, and does the engine give the same logprobs again?

The first test is exact and holds for any dtype: the ids before each sampled span are the prompt ids that the engine
echoed for that call. The traces of a session train each sampled token once, or its call is excluded for a reason that
the episode's builder settings give. Over all episodes, each call has its tokens in one session, and is context only in
the branches of that session. The second test: one forward pass over each trace gives the captured logprobs again. This
can hold where the captured logprobs are the model's own: temperature 1 without truncation or penalties, or an engine
that reports raw logprobs. The embedded engine also repeats the sampler's choices: the temperature, the recorded
sampling mask and the recorded experts. Penalties cannot be repeated. Calls under a grammar are compared apart: their
captured logprobs are those of the constrained distribution.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polar_gym.builders.exclusions import exclusions
from polar_gym.builders.fidelity import miscounts
from polar_gym.builders.trace import verify_trace
from polar_gym.engines import Engine, Replay, Replaying
from polar_gym.engines.sampling import truncating_fields
from polar_gym.episodes.reading import read_calls
from polar_gym.schema import Episode, ModelCall, Sampling, Trace


@dataclass(slots=True)
class Verification:
    """The results of the two tests."""

    traces: int = 0
    exact: int = 0
    """Traces that hold what their calls saw and sampled."""
    calls: int = 0
    broken: list[str] = field(default_factory=list)
    """One line for each trace and each call that failed the exact test."""
    compared: defaultdict[str, list[NDArray[np.float32]]] = field(default_factory=lambda: defaultdict(list))
    """|captured - recomputed| logprobs of sampled tokens, an array for each call, by the way in which calls were
    compared: `free` or `under a grammar` (also a forced tool), and the choices that the pass repeated."""
    not_comparable: int = 0
    """Sampled tokens whose captured logprobs are not the model's own (temperature, truncation, penalties), where the
    engine cannot repeat the choices of the sampler, or their record is missing."""
    sampled: set[str] = field(default_factory=set)
    """The calls whose tokens an episode has as its own."""
    no_room: int = 0
    """Sampled tokens at the ends of traces that fill the engine's context: the engine does not score them."""


async def verify_file(episodes: Iterable[Episode], settings: Sequence[str]) -> Verification:
    """Run both tests, the second if `settings` (`key=value`) choose an engine. Raises `ConfigError`, `EngineError`."""
    if not settings:
        return await verify(episodes, None)
    from polar_gym.config.loading import load_config  # these load Hydra, which reading episodes does not need
    from polar_gym.gateway.node.assemble import make_engine

    engine = make_engine(load_config(None, settings), [])
    await engine.start()
    try:
        return await verify(episodes, engine)
    finally:
        await engine.close()


async def verify(episodes: Iterable[Episode], engine: Engine | None) -> Verification:
    """Run both tests, the second only with an engine. Raises `ConfigError` where a journal is missing or damaged."""
    result = Verification()
    owners: dict[str, tuple[str, bytes]] = {}
    for episode in episodes:
        calls = read_calls(episode)
        result.calls += len(calls)
        traces, exact_before = episode.trajectory.traces, result.exact
        result.traces += len(traces)
        for trace in traces:
            try:
                verify_trace(trace, calls)
            except ValueError as error:
                result.broken.append(str(error))
                continue
            result.exact += 1
            if engine is not None:
                await _compare(result, episode, trace, calls, engine)
        if result.exact - exact_before == len(traces) and _built(episode):
            ordered = sorted(calls, key=lambda call: call.index)
            for line in miscounts(ordered, traces, exclusions(ordered, episode.request.builder)):
                result.broken.append(f"session {episode.session.session_id}: {line}")
        _check_owner(result, episode, calls, owners)
    return result


def _built(episode: Episode) -> bool:
    """Return whether a builder made the trajectory. One that failed, and an episode that the rollout server refused,
    leave no traces and say so in the session's failure."""
    trajectory = episode.trajectory
    return bool(trajectory.traces or trajectory.fidelity.trainable_tokens or episode.session.failure is None)


def _check_owner(
    result: Verification, episode: Episode, calls: Sequence[ModelCall], owners: dict[str, tuple[str, bytes]]
) -> None:
    """Check the calls of one session against those of the sessions before: each was sampled once, and has the same
    tokens in all. `owners`: call -> the session that has its tokens, and a digest."""
    session_id = episode.session.session_id
    for call in calls:
        shared, owner = call.branched_from is not None, call.branched_from or session_id
        tokens = b"".join((call.prompt_ids.data, b"|", call.response_ids.data, b"|", call.logprobs.data))
        digest = hashlib.blake2b(tokens).digest()
        known = owners.setdefault(call.call_id, (owner, digest))
        if known[0] != owner:
            result.broken.append(f"call {call.call_id}: sampled in session {known[0]} and again in {owner}")
        elif known[1] != digest:
            result.broken.append(f"call {call.call_id}: session {session_id} has other tokens than session {known[0]}")
        elif not shared and call.call_id in result.sampled:
            result.broken.append(f"call {call.call_id}: two attempts of session {session_id} have its tokens")
        if not shared:
            result.sampled.add(call.call_id)


async def _compare(
    result: Verification, episode: Episode, trace: Trace, calls: Sequence[ModelCall], engine: Engine
) -> None:
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    replay = Replay.neutral(len(ids))
    replay.routed_experts = trace.routed_experts
    replaying = engine if isinstance(engine, Replaying) else None
    raw = episode.engine.logprobs_mode == "raw"
    spans = [(call, [] if raw else _repeat(call, replay if replaying else None)) for call in _spans(trace, calls)]
    again = await (replaying.replay(ids, replay) if replaying else engine.score(ids))
    forced = [] if trace.routed_experts is None or replaying is None else ["routed experts"]
    for call, repeated in spans:
        delta = call.differences(again)
        result.no_room += len(call.response_ids) - len(delta)
        if repeated is None:
            result.not_comparable += len(delta)
        else:
            way = "under a grammar" if call.sampling_mismatch else "free"
            if repeated or forced:
                way += f", repeating {', '.join([*repeated, *forced])}"
            elif trace.routed_experts is not None:
                way += ", experts not repeated"
            result.compared[way].append(delta)


def _repeat(call: ModelCall, replay: Replay | None) -> list[str] | None:
    """Add the choices of a call's sampler to those that a pass repeats, and return their names: none where the
    logprobs are the model's own. Return None where the pass cannot repeat them."""
    shaping, cutting = Sampling.shaping(call.sampling), truncating_fields(call.sampling)
    if not shaping:
        return []
    temperature, mask = call.sampling.get("temperature") or 0.0, call.sampling_mask
    known = not cutting or mask is not None
    if replay is None or not known or temperature <= 0 or not {*shaping} <= {"temperature", *cutting}:
        return None
    span = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids))
    replay.temperature[span] = temperature
    if cutting and mask is not None:
        replay.kept[span] = mask.sets()
    return [*(["temperature"] if "temperature" in shaping else []), *(["sampling mask"] if cutting else [])]


def _spans(trace: Trace, calls: Sequence[ModelCall]) -> Iterator[ModelCall]:
    """Yield the calls whose tokens are trainable in this trace, so that a shared span is counted once."""
    for call in calls:
        offset = len(call.prompt_ids) - len(trace.prompt_ids)
        if call.call_id in trace.call_ids and trace.loss_mask[offset : offset + len(call.response_ids)].any():
            yield call
