"""How many prompt tokens the engine took from its prefix cache, of those that it could have taken at best.

The ideal follows from the recorded ids alone: of each prompt, the longest beginning that the run had sent or sampled
before, on any server and under any weights, or its parent's prompt and answer where that is longer. The last token of
a prompt is always computed. Each token between the ideal and `ModelCall.cached_tokens` is lost for one cause, in the
order of `CAUSES`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from polar_gym.console import table
from polar_gym.episodes.reading import read_all, read_calls
from polar_gym.errors import ConfigError
from polar_gym.record import common_prefix
from polar_gym.schema import ModelCall

CAUSES = ("break", "parallel", "update", "routing", "block", "eviction")
"""`break`: the prompt does not begin with its parent's ids. `parallel`: the call with these ids was not answered yet.
`update`: they were computed under other weights, whose cache must not be used. `routing`: another server has them.
`block`: the cache holds whole blocks only. `eviction`: the server had them, and has them no more."""
USUAL_BLOCK = 16
CHUNK = 16
"""Ids of one edge of a tree of prefixes."""


@dataclass(slots=True)
class Reuse:
    """Prompt tokens of some calls. `ideal == reused + sum(lost.values())`."""

    calls: int = 0
    prompt: int = 0
    ideal: int = 0
    reused: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, prompt: int, reused: int, lost: Counter[str]) -> None:
        self.calls += 1
        self.prompt += prompt
        self.reused += reused
        self.ideal += reused + lost.total()
        self.lost += lost


_Node: TypeAlias = "dict[bytes, _Node]"


class Prefixes:
    """The sequences that were seen, as a tree whose edges are chunks of ids."""

    def __init__(self) -> None:
        self._root: _Node = {}

    def add(self, ids: NDArray[np.int32]) -> None:
        node = self._root
        for chunk in _chunks(ids):
            node = node.setdefault(chunk, {})

    def longest(self, ids: NDArray[np.int32]) -> int:
        """Return how many of the first ids some sequence begins with."""
        node, known = self._root, 0
        for chunk in _chunks(ids):
            if chunk not in node:
                here = _ids(chunk)
                return known + max((common_prefix(here, _ids(other)) for other in node), default=0)
            node, known = node[chunk], known + len(chunk) // ids.itemsize
        return known


def _chunks(ids: NDArray[np.int32]) -> Iterator[bytes]:
    raw, step = ids.tobytes(), CHUNK * ids.itemsize
    return (raw[start : start + step] for start in range(0, len(raw), step))


def _ids(chunk: bytes) -> NDArray[np.int32]:
    return np.frombuffer(chunk, np.int32)


def lost_tokens(calls: Iterable[ModelCall], block: int) -> Iterator[tuple[ModelCall, int, Counter[str]]]:
    """Yield each call whose cached tokens are known, how many it reused, and what it lost by cause.

    `calls` are those of a whole run. `block`: tokens of a block of the engine's cache.
    """
    own = [call for call in calls if call.replayed is None and call.frozen is None and len(call.prompt_ids)]
    by_id = {call.call_id: call for call in own}
    moments = [(call.started_at, 1, index) for index, call in enumerate(own)]
    moments += [(call.started_at + call.duration, 0, index) for index, call in enumerate(own)]
    asked, answered = Prefixes(), Prefixes()
    caches: dict[tuple[str | None, ...], Prefixes] = {}
    for _, begins, index in sorted(moments):
        call, version = own[index], _version(own[index])
        places = [caches.setdefault(key, Prefixes()) for key in ((version,), (version, call.engine_url))]
        if not begins:
            whole = np.concatenate([call.prompt_ids, call.response_ids])
            for each in (answered, *places):
                each.add(whole)
            continue
        if call.cached_tokens is not None:
            most, cached = len(call.prompt_ids) - 1, call.cached_tokens
            parent = by_id.get(call.parent_id or "")
            known = [each.longest(call.prompt_ids) for each in (asked, answered, *places)]
            sent = 0 if parent is None else len(parent.prompt_ids) + len(parent.response_ids)
            best = [max(sent, *known), max(known), *known[1:]]
            whole_blocks = min(known[-1], most) // block * block
            levels = [max(min(most, level), cached) for level in (*best, whole_blocks, cached)]
            steps = zip(CAUSES, pairwise(levels), strict=True)
            yield call, cached, Counter({cause: more - less for cause, (more, less) in steps if more > less})
        asked.add(call.prompt_ids)


def _version(call: ModelCall) -> str | None:
    return call.weight_versions[0].version if call.weight_versions else None


def block_size(calls: Iterable[ModelCall]) -> int:
    """Return the largest block of which all cached beginnings are made; without any, the usual one."""
    return math.gcd(*(call.cached_tokens or 0 for call in calls)) or USUAL_BLOCK


def reuse_by_harness(files: Sequence[Path], block: int | None) -> tuple[dict[str, Reuse], int, int]:
    """Return the sums for each harness, the tokens of a block, and how many calls do not tell what was cached.

    The files are of one run. Raises `ConfigError` where a journal is missing, or where no call tells.
    """
    sessions = [(episode.session.harness, read_calls(episode)) for episode in read_all(files)]
    calls = [call for _, own in sessions for call in own]
    harness_of = {call.call_id: harness for harness, own in sessions for call in own}
    block = block or block_size(calls)
    sums: dict[str, Reuse] = {}
    for call, reused, lost in lost_tokens(calls, block):
        sums.setdefault(harness_of[call.call_id], Reuse()).add(len(call.prompt_ids), reused, lost)
    if not sums:
        raise ConfigError(
            f"{files[0]}: no call tells how many tokens were cached; start vLLM with --enable-prompt-tokens-details"
        )
    return sums, block, len(calls) - sum(each.calls for each in sums.values())


def reuse_table(sums: dict[str, Reuse]) -> Table:
    """Return a table with a row for each harness, and one for all of them."""
    total = Reuse()
    for each in sums.values():
        total.add(each.prompt, each.reused, each.lost)
    headings = ("prompt tokens", "reusable", "reused", "share", *(f"lost: {cause}" for cause in CAUSES))
    made = table("prefix reuse", "harness", *headings)
    for name, each in (*sums.items(), *([("all", total)] if len(sums) > 1 else [])):
        share = f"{each.reused / each.ideal:.1%}" if each.ideal else ""
        counts = (each.prompt, each.ideal, each.reused)
        made.add_row(name, *map(str, counts), share, *(str(each.lost[cause]) for cause in CAUSES))
    return made
