"""Judges the tool calls of a node's sessions, and warns where none of the first ones works."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from polar_gym.builders.tool_attempts import MARKERS, tool_attempts
from polar_gym.chat.messages import assistant_message
from polar_gym.engines import EngineError
from polar_gym.schema import Message, ModelCall, Trajectory
from polar_gym.splicing.prompt import Templater

log = logging.getLogger(__name__)

FIRST_EPISODES = 8
"""How many episodes with answers to requests with tools are enough for a warning."""

CALL = {"id": "call12345", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
CALLING: list[Message] = [
    {"role": "user", "content": "Hello."},
    assistant_message(None, None, [CALL]),
    {"role": "tool", "tool_call_id": CALL["id"], "content": "pong"},
]


class ToolCalls:
    """The tool calls of one engine's policy."""

    def __init__(self) -> None:
        self._markers: dict[int, str] = {}
        self._first: Counter[str] = Counter()

    async def learn(self, engine: Templater) -> None:
        """Find the markers that are one token each where the engine's template prints a tool call."""
        try:
            ids = np.setdiff1d(await engine.template(CALLING, []), await engine.template(CALLING[:1], [])).tolist()
            texts = {token: (await engine.decode([token])).strip() for token in ids}
        except EngineError as error:
            log.info("tool-call attempts will have no spans, because no call can be templated: %s", error.message)
            return
        self._markers = {token: text for token, text in texts.items() if text in {*MARKERS, *MARKERS.values()}}

    async def judge(self, trajectory: Trajectory, calls: Sequence[ModelCall]) -> None:
        """Set the attempts of the session's own policy. Warn after the first episodes where none of them is `ok`."""
        own = [call for call in calls if call.frozen is None and call.branched_from is None]
        answered = [call for call in own if call.tools and call.outcome == "delivered"]
        judged = await asyncio.to_thread(lambda: [tool_attempts(call, self._markers) for call in answered])
        trajectory.tool_attempts = [attempt for attempts in judged for attempt in attempts]
        first = self._first
        if not answered or first["ok"] or first["episodes"] == FIRST_EPISODES:
            return
        first.update({"episodes": 1, "answers": len(answered)})
        first.update(attempt.status for attempt in trajectory.tool_attempts)
        if first["episodes"] == FIRST_EPISODES and not first["ok"]:
            log.warning(
                "no tool call works: %(answers)d answers to requests with tools hold %(malformed)d malformed calls, "
                "%(unknown_tool)d of unknown tools and %(schema_violation)d against a schema. Start vLLM with the "
                "--tool-call-parser of this model, and make sure that its chat template prints the tools",
                first,
            )
