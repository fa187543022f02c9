"""Finds out whether an engine that failed a call fails other requests, too."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from polar_gym.chat import ChatRequest
from polar_gym.engines import Engine
from polar_gym.schema import Message, Sampling

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
"""How long a live engine may take for one token."""
HELLO: Message = {"role": "user", "content": "Hello"}


Outcome = Literal["samples", "fails", "silent"]
"""`silent`: no answer within `PROBE_SECONDS`. A busy engine is silent, too, and one that gets new weights."""


async def probe(engine: Engine, sampling: Sampling) -> Outcome:
    """Return how an engine takes a request of our own, for one token. `sampling`: that of the engine's calls, because
    NeMo RL's server refuses any other."""
    request = ChatRequest(model=engine.info.model, messages=[HELLO], max_tokens=1)
    deadline = asyncio.timeout(PROBE_SECONDS)
    try:
        async with deadline:
            await engine.chat(request, sampling)
    except Exception as error:  # noqa: BLE001 - an engine that fails by any error does not answer
        log.warning("the engine does not answer a request of one token: %r", error)
        return "silent" if deadline.expired() else "fails"
    return "samples"
