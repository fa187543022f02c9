"""An engine that has a harness run shell commands, several in a turn, and that fails where it is told to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.chat.messages import assistant_message, canonical_json
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.engines.embedded.shell_tools import find_shell, shell_arguments
from polar_gym.schema import Message, Sampling

FINAL = "All of it is done."


class Turns(ScriptedPolicy):
    """Calls the shell tool once for each command of a turn, and says `FINAL` after the last turn."""

    def __init__(self, turns: Sequence[Sequence[str]]) -> None:
        super().__init__(EmbeddedOptions())
        self._turns = turns

    def next_message(self, request: ChatRequest) -> Message:
        shell = find_shell(request.tools)
        played = sum(1 for message in request.messages if message.get("tool_calls"))
        if shell is None or played >= len(self._turns):
            return assistant_message(FINAL, None, [])
        calls = [canonical_json(shell_arguments(shell, command)) for command in self._turns[played]]
        functions = [{"name": shell.name, "arguments": arguments} for arguments in calls]
        return assistant_message(None, None, [{"type": "function", "function": each} for each in functions])


class Rehearsal(EmbeddedEngine):
    """Plays turns. `asked` holds the requests, also those that it fails."""

    def __init__(
        self,
        turns: Sequence[Sequence[str]],
        *,
        error: EngineError | None = None,
        fails: Collection[int] = (),
        cuts: bool = False,
    ) -> None:
        """`error`: raised for the requests whose numbers are in `fails`; `cuts`: after the first word of the answer."""
        super().__init__(EmbeddedOptions())
        self._policy = Turns(turns)
        self._error, self._fails, self._cuts = error, fails, cuts
        self.asked: list[ChatRequest] = []

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.asked.append(request)
        if self._error is None or len(self.asked) - 1 not in self._fails:
            return await super().chat(request, sampling, on_delta)
        if self._cuts and on_delta is not None:
            good = await super().chat(request, sampling)
            first = good.response_ids[:1].tolist()
            on_delta(Delta(content="I", prompt_ids=good.prompt_ids, response_ids=first, logprobs=[0.0]))
        raise self._error
