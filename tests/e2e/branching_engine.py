"""The acting engines with a policy whose samples differ: each says its own words from one of its turns on."""

from __future__ import annotations

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message
from polar_gym.conformance.acting import CompactingPolicy, DelegatingPolicy
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.schema import Message


class BranchingOptions(EmbeddedOptions):
    sample: int = 0
    """The number that the answers say."""
    branch_at: int = 0
    """The first turn that says the number: the turns before are those of all samples."""


class _OwnWords(ScriptedPolicy):
    def __init__(self, options: BranchingOptions) -> None:
        super().__init__(options)
        self.options = options

    def next_message(self, request: ChatRequest) -> Message:
        message = super().next_message(request)
        turn = sum(earlier["role"] == "assistant" for earlier in request.messages)
        if not request.tools or turn < self.options.branch_at:
            return message
        words = f"I am sample {self.options.sample}. {message.get('content') or ''}"
        return assistant_message(words, None, message.get("tool_calls") or [])


class _Delegating(_OwnWords, DelegatingPolicy): ...


class _Compacting(_OwnWords, CompactingPolicy): ...


class Branching(EmbeddedEngine):
    Options = BranchingOptions
    policy: type[_OwnWords] = _OwnWords

    def __init__(self, options: BranchingOptions) -> None:
        super().__init__(options)
        self._policy = self.policy(options)


class Delegating(Branching):
    policy = _Delegating


class Compacting(Branching):
    policy = _Compacting
