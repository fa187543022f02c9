"""Between a parsed request and the engine: find the call that the request continues, translate, splice.

The engine and the record get a request in the engine's terms: its tool-call ids, roles and content that its template
takes. Later requests are compared with the request in the harness's terms.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from polar_gym.chat import ChatRequest
from polar_gym.chat.ids import EngineIds
from polar_gym.engines import Engine
from polar_gym.schema import Message, ModelCall
from polar_gym.splicing.conversation import Conversations, identities_of_long
from polar_gym.splicing.prompt import Learned, NoSplice, Templater, spliced_prompt
from polar_gym.splicing.recording import Recording

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a request is put to the engine."""

    request: ChatRequest
    """In the engine's terms, with `prompt_ids` where the prompt is spliced."""
    parent_id: str | None = None
    continuation: Literal["root", "spliced", "canonical"] = "root"
    cause: str | None = None
    """Why a continuation was not spliced, or why a request that names known calls continues none of them."""
    history: bytes = b""
    """See `Continuation.history`."""
    edited_answers: dict[str, list[str]] = field(default_factory=dict)
    """See `ModelCall.edited_answers`."""


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """The calls of one session that later requests may continue, and the engine's ids of their tool calls."""

    conversations: Conversations = field(default_factory=Conversations)
    engine_ids: EngineIds = field(default_factory=EngineIds)

    def remember(self, call: ModelCall, plan: Plan) -> None:
        """Add an answered call. This must happen before its answer leaves."""
        self.conversations.add(call, plan.history, self.engine_ids.mint(call.call_id, call.response))


class Splicer:
    """Splices the requests of all sessions of one engine. It stops when the engine turns out to ignore such prompts."""

    def __init__(self, engine: Engine, *, enabled: bool, keep_reasoning: bool = True) -> None:
        self._engine = engine
        self.enabled = enabled
        self._keep_reasoning = keep_reasoning
        self._learned = Learned()

    async def prepare(
        self,
        memory: SessionMemory,
        request: ChatRequest,
        asked: ChatRequest,
        recording: Recording | None = None,
        templater: Templater | None = None,
    ) -> Plan:
        """Return how `asked`, which is `request` in the engine's terms, is put to the engine. `recording`: the record
        that the session started from, whose messages the model has seen. `templater`: the session's server of the
        engine; None: the engine has one."""
        long = await identities_of_long(request.messages)
        continuation = memory.conversations.continuation(request.messages, request.tools, request.origins, long)
        parent = continuation.parent
        plan = Plan(request=asked, cause=continuation.cause, history=continuation.history)
        if parent is None:
            return plan
        plan = replace(
            plan,
            parent_id=parent.call_id,
            continuation="canonical",
            cause="off",
            edited_answers=continuation.edited_answers,
        )
        if not self.enabled:
            return plan
        new_messages = asked.messages[len(asked.messages) - len(continuation.new_messages) :]
        if recording is not None:
            answer = asked.messages[len(asked.messages) - len(new_messages) - 1]
            new_messages = recording.with_notices(asked.messages, parent, new_messages)
            asked = replace(asked, messages=[*parent.messages, answer, *new_messages])
        try:
            prompt_ids = await self._spliced(templater or self._engine, parent, asked.messages, new_messages)
        except NoSplice as problem:
            return replace(plan, cause=problem.cause)
        if self._engine.takes_prefix_only and any(message["role"] == "assistant" for message in new_messages):
            return replace(plan, cause="engine")
        prefix_length = len(parent.prompt_ids) + len(parent.response_ids)
        routed = 0 if parent.routed_experts is None else prefix_length - 1
        spliced = replace(asked, prompt_ids=prompt_ids, prefix_length=prefix_length, routed_positions=routed)
        return replace(plan, request=spliced, continuation="spliced", cause=None)

    async def _spliced(
        self, templater: Templater, parent: ModelCall, messages: list[Message], new_messages: list[Message]
    ) -> np.ndarray:
        if not self._keep_reasoning and _has_reasoning(parent):
            raise NoSplice("template")
        return await spliced_prompt(templater, parent, messages, new_messages, self._learned)

    def confirm(self, plan: Plan, prompt_ids: np.ndarray) -> Plan:
        """Return the plan as it was carried out: the engine says that it conditioned on `prompt_ids`.

        An engine that templates the new messages itself (NeMo RL's) may differ after the ids already seen. That makes
        the call `canonical`, but breaks nothing.
        """
        spliced, seen = plan.request.prompt_ids, plan.request.prefix_length
        if spliced is None or spliced is prompt_ids or np.array_equal(spliced, prompt_ids):
            return plan
        if not np.array_equal(spliced[:seen], prompt_ids[:seen]):
            self.enabled = False
            log.warning("the engine ignores pre-tokenised prompts: splicing is off from here on; traces may fork")
        return replace(plan, continuation="canonical", cause="engine")


def _has_reasoning(call: ModelCall) -> bool:
    """Return whether the conversation up to the call's answer has reasoning, which a template might drop."""
    return any(message.get("reasoning") for message in (*call.messages, call.response or {}))
