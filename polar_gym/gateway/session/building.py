"""Builds the trajectory of a session from its captured calls, off the event loop and in bounded time.

A broken builder fails the session that asked for it, and no other session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from polar_gym.builders import build_trajectory
from polar_gym.schema import BuilderSpec, Fidelity, ModelCall, Trajectory

log = logging.getLogger(__name__)

BUILD_SECONDS = 600.0
NOT_BUILT = "not_built"
"""The reason by which all tokens are excluded where the builder failed."""


async def build(calls: Sequence[ModelCall], spec: BuilderSpec) -> tuple[Trajectory, str | None]:
    """Return the trajectory, and the problem of the builder if there was one.

    With a problem, the trajectory has no traces, and all its tokens are excluded.
    """
    try:
        async with asyncio.timeout(BUILD_SECONDS):
            return await asyncio.to_thread(build_trajectory, calls, spec), None
    except TimeoutError:
        problem = f"the builder {spec.name} was not done within {BUILD_SECONDS:g} seconds"
    except Exception as error:
        log.exception("the builder %s failed", spec.name)
        problem = f"the builder {spec.name} raised {error!r}"
    return _without_traces(calls, spec), problem


def _without_traces(calls: Sequence[ModelCall], spec: BuilderSpec) -> Trajectory:
    sampled = sum(len(call.response_ids) for call in calls)
    excluded = {NOT_BUILT: sampled} if sampled else {}
    return Trajectory(
        builder=spec.name, traces=[], fidelity=Fidelity(sampled_tokens=sampled, excluded=excluded, calls=len(calls))
    )


def final_message(calls: Sequence[ModelCall]) -> str:
    """Return the text of the last answer that the harness received in its main conversation."""
    for call in reversed(calls):
        if call.kind == "main" and call.outcome == "delivered" and call.response is not None:
            return str(call.response.get("content") or "")
    return ""
