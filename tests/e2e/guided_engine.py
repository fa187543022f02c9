"""An engine for tests on a real vLLM, whose own grammar makes its model say the text of a test."""

from __future__ import annotations

from typing import Any

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines.vllm import VllmEngine
from polar_gym.schema import Sampling
from tests.support.sessions import REQUEST

SEEDED = REQUEST.model_copy(update={"sampling": Sampling(seed=7)})

TWO_CALLS = (
    "Looking.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -a"}}\n</tool_call>'
)


class OneSeed(VllmEngine):
    """vLLM that samples each call with one seed, so that a request that is repeated gets the same answer."""

    seed = 7

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        return await super().chat(request, sampling.model_copy(update={"seed": self.seed}), on_delta)


class GuidedEngine(VllmEngine):
    """vLLM whose own grammar makes a random model say `says`. vLLM still chooses the tokens."""

    says: str | None = None

    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        guided = {"structured_outputs": {"choice": [self.says]}, "chat_template_kwargs": {"enable_thinking": False}}
        return super()._chat_body(request, fields) | (guided if self.says else {})


def without_ids(completion: Completion) -> Any:
    """Return the message without the ids of its tool calls, which differ from answer to answer."""
    calls = completion.message.get("tool_calls", [])
    return {**completion.message, "tool_calls": [call["function"] for call in calls]}
