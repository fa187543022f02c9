"""Calls are scored again while sessions run: which ones, at what cost, and what follows for the episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.config.run_config import ScoringConfig
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.gateway.proxy.scoring import Scoring
from polar_gym.gateway.session.life import SessionLife
from polar_gym.schema import Episode, ModelCall, Sampling, Status
from tests.support.calls import make_call
from tests.support.requirements import need_bubblewrap
from tests.support.scored_engine import ScoredEngine
from tests.support.sessions import REQUEST, asking, task

Ask = Callable[[], Coroutine[Any, Any, None]]
DUE_ONLY = ScoringConfig(share=0.0)
NEUTRAL = Sampling().model_dump(exclude_none=True)
ENGINE = ScoredEngine()


@asynccontextmanager
async def session(
    engine: ScoredEngine, directory: Path, scoring: ScoringConfig = DUE_ONLY, **fields: Any
) -> AsyncIterator[tuple[Node, SessionLife, Ask]]:
    """Start a node with one running session, and yield a function that makes a call in it."""
    node = Node(engine, cache=directory / "cache", state=directory / "state", scoring=scoring)
    request = REQUEST.model_copy(update=fields)
    async with node, node.session(request) as life, aiohttp.ClientSession() as http:
        life.capture.running = True

        async def ask() -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
            headers = {"Authorization": f"Bearer {life.capture.key}"}
            async with http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()

        yield node, life, ask


def problems(calls: list[ModelCall]) -> list[list[str | None]]:
    return [[score.problem for score in call.scores] for call in calls]


async def test_the_first_call_after_the_start_and_after_each_update_is_scored(tmp_path: Path) -> None:
    async with session(ScoredEngine(), tmp_path) as (node, life, ask):
        for version in (None, "1", "2"):
            if version is not None:
                node.set_weight_version(version)
            await ask()
            await ask()
        episode = await life.finish(None)
    calls = read_journal(Path(str(episode.artifacts.journal)))
    assert problems(calls) == [[None], []] * 3
    assert [score for call in calls for score in call.scores] == episode.trajectory.fidelity.scores
    (first,) = calls[0].scores
    assert (first.tokens, first.mean_abs, first.max_abs) == (len(calls[0].response_ids), 0.0, 0.0)
    assert first.read == len(calls[0].prompt_ids) + len(calls[0].response_ids)
    assert episode.session.failure is None


async def test_no_answer_and_no_next_call_waits_for_a_pass_but_the_episode_does(tmp_path: Path) -> None:
    engine = ScoredEngine()
    engine.go_on.clear()
    async with session(engine, tmp_path) as (_, life, ask):
        await ask()
        await engine.asked.wait()
        await ask()
        assert problems(life.capture.calls) == [[], []]
        ending = asyncio.create_task(life.finish(None))
        engine.go_on.set()
        episode = await ending
    assert [score.problem for score in episode.trajectory.fidelity.scores] == [None]


async def test_a_pass_during_which_the_weights_change_is_void_and_made_up_for(tmp_path: Path) -> None:
    engine = ScoredEngine(bent=3.0)
    engine.go_on.clear()
    async with session(engine, tmp_path) as (node, life, ask):
        await ask()
        await engine.asked.wait()
        node.set_weight_version("1")
        engine.bent = 0.0
        engine.go_on.set()
        await ask()
        episode = await life.finish(None)
    assert problems(life.capture.calls) == [["weights_changed"], [None]]
    assert episode.session.failure is None


async def test_a_pause_is_not_settled_before_the_passes_have_ended(tmp_path: Path) -> None:
    """Guards against new weights that are loaded while the engine computes a pass: no call was under way."""
    engine = ScoredEngine()
    engine.go_on.clear()
    async with session(engine, tmp_path) as (node, life, ask):
        await ask()
        await engine.asked.wait()
        node.proxy.generation.pause()
        assert node.proxy.generation.in_flight == 1
        engine.go_on.set()
        await node.proxy.generation.idle(60)
        assert node.proxy.generation.in_flight == 0
        life.capture.score(make_call(0, [1] * 9, [2] * 20, sampling=NEUTRAL), 0, engine)
        assert engine.passes == 1, "none begins in a pause"
        await life.finish(None)


async def test_a_pass_that_a_cancelled_session_cuts_off_says_so_and_is_made_up_for(tmp_path: Path) -> None:
    engine = ScoredEngine()
    engine.go_on.clear()
    async with session(engine, tmp_path) as (node, life, ask):
        await ask()
        await engine.asked.wait()
        episode = await life.abandon(Status.CANCELLED)
        assert [score.problem for score in episode.trajectory.fidelity.scores] == ["cancelled"]
        assert problems(read_journal(life.capture.journal.path)) == [["cancelled"]]
        async with node.session(REQUEST) as other:
            other.capture.running = True
            other.capture.record(call := make_call(0, [1] * 9, [2] * 20, sampling=NEUTRAL))
            other.capture.score(call, 0, engine)
            engine.go_on.set()
            await other.finish(None)
    assert problems([call]) == [[None]]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sampling": {"temperature": 0.5}}, [["sampled with temperature"]]),
        ({"sampling_mismatch": ["forced tool"]}, [[]]),
        ({"response_ids": [1] * 15}, [[]]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, [[]]),
    ],
)
async def test_a_call_that_cannot_be_compared_is_not_scored(tmp_path: Path, fields: Any, told: Any) -> None:
    engine = ScoredEngine()
    sampled = fields.pop("response_ids", [1] * 20)
    sampling = NEUTRAL | fields.pop("sampling", {})
    async with session(engine, tmp_path) as (_, life, ask):
        life.capture.record(call := make_call(0, [1] * 50, sampled, sampling=sampling, **fields))
        life.capture.score(call, 0, engine)
        assert problems(life.capture.calls) == told
        await ask()
        await life.finish(None)
    assert problems(life.capture.calls) == [*told, [None]], "the next call is still due"


async def test_an_engine_that_cannot_score_costs_no_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScoredEngine()
    engine.bent = None  # pyright: ignore[reportAttributeAccessIssue] - a pass raises
    async with session(engine, tmp_path) as (_, life, ask):
        await ask()
        episode = await life.finish(None)
    assert [score.problem for score in episode.trajectory.fidelity.scores] == ["TypeError"]
    assert episode.session.failure is None
    assert "could not be scored by the engine: TypeError" in caplog.text


async def test_a_call_whose_logprobs_differ_masks_its_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_bubblewrap()
    episodes: list[Episode] = []
    engine = ScoredEngine(bent=0.5)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state", scoring=DUE_ONLY) as node:
        for _ in range(2):
            episodes.append(await node.rollout(task(agent=asking())))
        engine.bent = 0.1
        episodes += [await node.rollout(task(agent=asking())) for _ in range(2)]
    failures = [episode.session.failure for episode in episodes]
    assert [failure and failure.kind for failure in failures] == ["logprobs_mismatch"] * 2 + [None] * 2
    assert [episode.reward for episode in episodes[:2]] == [None, None]
    assert [len(episode.trajectory.fidelity.scores) for episode in episodes] == [1, 1, 1, 0], "it is followed up"
    assert failures[0] is not None
    assert "0.5 nats in the mean, 0.5 at most (scoring.mask_above=0.2)" in failures[0].message
    assert caplog.text.count("nats in the mean") == 1


@given(
    share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    events=st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 300), st.integers(1, 60), st.floats(0, 1)))),
)
async def test_what_scoring_costs_stays_within_its_share(share: float, events: list[Any]) -> None:
    """None is an update of the weights; the others are calls: prompt, answer, the part of the prompt that is known."""
    scoring = Scoring(ScoringConfig(share=share, mask_above=100), GenerationGate())
    updates, prefill, ENGINE.passes = 1, 0, 0
    read: dict[bool, list[int]] = {True: [], False: []}
    for event in events:
        if event is None:
            scoring.due = True
            updates += 1
            continue
        prompt, answer, part = event
        known, due = int(prompt * part), scoring.due
        prefill += prompt - known
        call = make_call(0, [1] * prompt, [1] * answer, sampling=NEUTRAL)
        if (
            made := scoring.consider(call, known, ENGINE, lambda call, scores: setattr(call, "scores", scores))
        ) is not None:
            await made
            read[due].append(call.scores[0].read)
    passes = read[True] + read[False]
    assert (scoring.prefill, scoring.read, ENGINE.passes) == (prefill, sum(passes), len(passes))
    assert sum(read[False]) <= share * prefill
    assert len(read[True]) <= updates


async def test_a_call_for_which_the_engine_may_lack_memory_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a vLLM that dies of the logits of a long prompt."""
    scoring = Scoring(ScoringConfig(longest=99), GenerationGate())
    long, fits = (make_call(0, [1] * prompt, [1] * 20, sampling=NEUTRAL) for prompt in (80, 79))
    for _ in range(2):
        assert scoring.consider(long, 0, ENGINE, lambda call, scores: None) is None
    made = scoring.consider(fits, 0, ENGINE, lambda call, scores: None)
    assert made is not None, "the score stays due"
    await made
    assert caplog.text.count("scoring.longest=99") == 1
