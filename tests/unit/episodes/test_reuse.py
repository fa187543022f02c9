"""What the prefix cache could have spared at best, and where the difference goes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.episodes.reuse import CAUSES, Prefixes, Reuse, block_size, lost_tokens
from polar_gym.schema import ModelCall, WeightVersion
from tests.support.calls import make_call

BLOCK = 4


def call(
    index: int, prompt: list[int], response: list[int], at: float, version: str = "1", server: str = "a", **fields: Any
) -> ModelCall:
    made = make_call(index, prompt, response, **fields)
    span = WeightVersion(version=version, start=0, end=len(response))
    told = {"started_at": at, "duration": 0.5, "weight_versions": [span], "engine_url": server}
    return made.model_copy(update={"cached_tokens": 0, **told})


def lost(*calls: ModelCall) -> list[tuple[int, dict[str, int]]]:
    return [(reused, dict(causes)) for _, reused, causes in lost_tokens(calls, BLOCK)]


def test_each_cause_has_its_tokens() -> None:
    first = call(0, list(range(10)), [50, 51], at=0)
    whole = [*range(10), 50, 51]
    assert lost(first, call(1, [*whole, 60], [1], at=1)) == [(0, {}), (0, {"eviction": 12})]
    assert lost(first, call(1, [*whole, 60], [1], at=1).model_copy(update={"cached_tokens": 8})) == [
        (0, {}),
        (8, {"eviction": 4}),
    ]
    assert lost(first, call(1, [*whole[:11], 60], [1], at=1))[1] == (0, {"eviction": 8, "block": 3})
    assert lost(first, call(1, whole, [1], at=1))[1] == (0, {"eviction": 8, "block": 3}), "the last one is computed"
    assert lost(first, call(1, [*whole, 60], [1], at=1, version="2"))[1] == (0, {"update": 12})
    assert lost(first, call(1, [*whole, 60], [1], at=1, server="b"))[1] == (0, {"routing": 12})
    assert lost(first, call(1, [*whole, 60], [1], at=0.1))[1] == (0, {"parallel": 10})
    broken = call(1, [*whole[:4], 9, 9, 9, 9, 9, 9, 9, 9, 9], [1], at=1, parent_id=first.call_id)
    assert lost(first, broken)[1] == (0, {"break": 8, "eviction": 4})


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
CALLS = st.lists(st.tuples(IDS, IDS, st.sampled_from("12"), st.sampled_from("ab"), st.integers(0, 20)), max_size=10)


@given(CALLS)
def test_a_cache_that_forgets_nothing_loses_nothing_by_eviction(drawn: list[Any]) -> None:
    """One call after another, each on a server that keeps every whole block that it has seen."""
    kept: set[tuple[Any, ...]] = set()
    calls = []
    for index, (prompt, response, version, server, _) in enumerate(drawn):
        starts = range(BLOCK, len(prompt), BLOCK)
        hits = [(version, server, *prompt[:end]) in kept for end in starts]
        cached = BLOCK * (hits.index(False) if False in hits else len(hits))
        made = call(index, prompt, response, at=index, version=version, server=server)
        calls.append(made.model_copy(update={"cached_tokens": cached}))
        whole = [*prompt, *response]
        kept |= {(version, server, *whole[:end]) for end in range(BLOCK, len(whole) + 1, BLOCK)}
    for _, _, causes in lost_tokens(calls, BLOCK):
        assert set(causes) <= {"update", "routing", "block"}


@given(CALLS)
def test_every_token_of_the_ideal_is_reused_or_lost_for_one_cause(drawn: list[Any]) -> None:
    """Whatever an engine says, and in whatever order calls came."""
    calls = [
        call(index, prompt, response, at=claimed / 3, version=version, server=server).model_copy(
            update={"cached_tokens": min(claimed, len(prompt))}
        )
        for index, (prompt, response, version, server, claimed) in enumerate(drawn)
    ]
    total, seen = Reuse(), Counter()
    for made, reused, causes in lost_tokens(calls, BLOCK):
        assert reused == made.cached_tokens
        assert set(causes) <= set(CAUSES)
        assert all(count > 0 for count in causes.values())
        assert reused + causes.total() <= max(len(made.prompt_ids) - 1, reused)
        total.add(len(made.prompt_ids), reused, causes)
        seen[made.call_id] += 1
    assert total.calls == len(calls) == len(seen)
    assert total.ideal == total.reused + total.lost.total()


@given(st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=6), st.lists(st.integers(0, 2), max_size=60))
def test_the_longest_known_beginning(known: list[list[int]], asked: list[int]) -> None:
    prefixes = Prefixes()
    for ids in known:
        prefixes.add(np.asarray(ids, np.int32))
    beginnings = [asked[:length] for length in range(len(asked) + 1)]
    longest = max(len(each) for each in beginnings if not each or any(ids[: len(each)] == each for ids in known))
    assert prefixes.longest(np.asarray(asked, np.int32)) == longest


def test_the_block_is_told_by_the_calls() -> None:
    calls = [call(0, [1] * 100, [1], at=0).model_copy(update={"cached_tokens": n}) for n in (0, 32, 48, None)]
    assert block_size(calls) == 16
    assert block_size(calls[:1]) == 16


def test_calls_that_no_engine_answered_now_do_not_count() -> None:
    made = call(0, [1] * 20, [1], at=0)
    others = [made.model_copy(update={"call_id": "f", "frozen": "m"}), made.model_copy(update={"cached_tokens": None})]
    assert lost(*others, call(1, [1] * 20, [1], at=1)) == [(0, {"block": 3, "eviction": 16})]
