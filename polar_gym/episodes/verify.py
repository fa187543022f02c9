"""`polar-gym verify`: does every trace hold what the model saw, and does the engine give the same logprobs again?

The first test is exact and holds for any dtype: the ids before each sampled span are the prompt ids that the engine
echoed for that call. The second test: one forward pass over each trace gives the captured logprobs again. This can hold
only where the captured logprobs are the model's own: temperature 1 without truncation or penalties, or an engine that
reports raw logprobs. Calls under a grammar are compared apart: their captured logprobs are those of the constrained
distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polar_gym.builders.trace import verify_trace
from polar_gym.engines import Engine
from polar_gym.engines.sampling import shaping_fields
from polar_gym.episodes.reading import read_calls
from polar_gym.schema import Episode, ModelCall, Trace


@dataclass(slots=True)
class Verification:
    """The results of the two tests."""

    traces: int = 0
    calls: int = 0
    broken: list[str] = field(default_factory=list)
    """One line for each trace that failed the exact test."""
    free: list[NDArray[np.float32]] = field(default_factory=list)
    """|captured - recomputed| logprobs of sampled tokens, an array for each call."""
    constrained: list[NDArray[np.float32]] = field(default_factory=list)
    """The same of calls under a grammar or a forced tool."""
    not_comparable: int = 0
    """Sampled tokens whose captured logprobs are not the model's own (temperature, truncation, penalties)."""
    no_room: int = 0
    """Sampled tokens at the ends of traces that fill the engine's context: the engine does not score them."""


async def verify_file(episodes: Sequence[Episode], settings: Sequence[str]) -> Verification:
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


async def verify(episodes: Sequence[Episode], engine: Engine | None) -> Verification:
    """Run both tests, the second only with an engine. Raises `ConfigError` where a journal is missing or damaged."""
    result = Verification()
    for episode in episodes:
        calls = read_calls(episode)
        result.calls += len(calls)
        for trace in episode.trajectory.traces:
            result.traces += 1
            try:
                verify_trace(trace, calls)
            except ValueError as error:
                result.broken.append(str(error))
                continue
            if engine is not None:
                await _compare(result, episode, trace, calls, engine)
    return result


async def _compare(
    result: Verification, episode: Episode, trace: Trace, calls: Sequence[ModelCall], engine: Engine
) -> None:
    again = await engine.score(np.concatenate([trace.prompt_ids, trace.response_ids]))
    raw = episode.engine.logprobs_mode == "raw"
    for call in _spans(trace, calls):
        delta = call.differences(again)
        result.no_room += len(call.response_ids) - len(delta)
        if not raw and shaping_fields(call.sampling):
            result.not_comparable += len(delta)
        else:
            (result.constrained if call.sampling_mismatch else result.free).append(delta)


def _spans(trace: Trace, calls: Sequence[ModelCall]) -> Iterator[ModelCall]:
    """Yield the calls whose tokens are trainable in this trace, so that a shared span is counted once."""
    for call in calls:
        offset = len(call.prompt_ids) - len(trace.prompt_ids)
        if call.call_id in trace.call_ids and trace.loss_mask[offset : offset + len(call.response_ids)].any():
            yield call
