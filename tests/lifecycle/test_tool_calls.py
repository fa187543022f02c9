"""Tool calls that the policy gets wrong, through a whole session: each is in the episode, with its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.chat import ChatRequest
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.policy import Generation, OnIds
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.gateway.node import tool_calls
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Episode, Sampling
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task
from tests.support.tools import BASH

OK = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
UNKNOWN = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'
VIOLATION = '<tool_call>{"name": "bash", "arguments": {"commands": ["ls"]}}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>'
NO_JSON = '<tool_call>{"name": "bash", "arguments": {"command": "ls"</tool_call>'


class Saying(ScriptedPolicy):
    """Says the given answers, one after another."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__(EmbeddedOptions())
        self._answers = iter(answers)

    async def generate(self, request: ChatRequest, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        ids = self._with_added_tokens.encode(next(self._answers) + "<|im_end|>").ids
        if on_ids is not None:
            on_ids(ids, [0.0] * len(ids))
        return Generation(ids, [0.0] * len(ids), "stop")


async def run(directory: Path, *answers: str) -> tuple[Episode, list[list[tuple[str, str | None, str]]]]:
    """Run a session with these answers. Return its episode, and status, name and sampled text of each attempt."""
    need_bubblewrap()
    engine = EmbeddedEngine(EmbeddedOptions())
    engine._policy = Saying(list(answers))
    harness = asking(f"for _ in range({len(answers)}): ask(tools={[BASH]!r})")
    async with Node(engine, cache=directory / "cache", state=directory / "state") as node:
        episode = await node.rollout(task(agent=harness))
        calls = read_journal(Path(str(episode.artifacts.journal)))
        seen: list[list[tuple[str, str | None, str]]] = []
        for call in calls:
            attempts = [each for each in episode.trajectory.tool_attempts if each.call_id == call.call_id]
            spans = [each.span or (0, 0) for each in attempts]
            texts = [await engine.decode(call.response_ids[start:end].tolist()) for start, end in spans]
            seen.append([(each.status, each.name, text) for each, text in zip(attempts, texts, strict=True)])
    assert episode.session.failure is None
    assert Episode.from_json(episode.to_json()).trajectory.tool_attempts == episode.trajectory.tool_attempts
    return episode, seen


async def test_each_attempt_is_in_the_episode_with_its_tokens(tmp_path: Path) -> None:
    """Guards against a malformed call that is nothing but text to the record."""
    _, seen = await run(
        tmp_path, f"I look.\n{OK}\n{OK}", UNKNOWN, VIOLATION, NO_OBJECT, f"So: {NO_JSON} and {OK}.", "Done."
    )
    assert seen == [
        [("ok", "bash", OK)] * 2,
        [("unknown_tool", "shell", UNKNOWN)],
        [("schema_violation", "bash", VIOLATION)],
        [("malformed", "bash", NO_OBJECT)],
        [("malformed", None, NO_JSON), ("malformed", None, OK)],  # of such an answer the parser takes no call
        [],
    ]


@pytest.mark.parametrize(("answers", "warned"), [([NO_JSON, "Done."], True), ([NO_JSON, OK], False)])
async def test_a_run_without_a_tool_call_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: list[str],
    warned: bool,
) -> None:
    monkeypatch.setattr(tool_calls, "FIRST_EPISODES", 1)
    await run(tmp_path, *answers)
    assert ("no tool call works: 2 answers to requests with tools hold 1 malformed calls" in caplog.text) == warned
