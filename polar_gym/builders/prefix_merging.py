"""Calls that continue each other token for token become one trace. Where the prefix broke, a new trace begins.

Each leaf of the token tree is one trace: the path from the root to it, with every sampled span at the place where it
was sampled. A span that several paths share (a fork) is trainable in one of them only: the path with most to train.
Separate traces are therefore made of main threads, sub-agents, conversations before and after a compaction, and retried
turns. A path ends with its last call that is not excluded. The conversation did not end with an abandoned answer, and
an image after all trained tokens is not their context.

A call forks, too, where its kind differs from that of the call that it continues. (Some harnesses ask for a
compaction's summary at the end of the same conversation.) A trace trains calls of one kind, and has the others as
context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar_gym.builders.trace import merge_path
from polar_gym.builders.tree import token_tree
from polar_gym.schema import ModelCall, Trace


def prefix_merging(calls: Sequence[ModelCall], excluded: Mapping[str, str]) -> list[Trace]:
    nodes = token_tree(calls)
    continued = {node.parent for node in nodes if node.parent and node.parent.call.kind == node.call.kind}
    paths = [_to_the_last_not_excluded(node.path(), excluded) for node in nodes if node not in continued]
    paths = [path for path in paths if path]
    paths.sort(key=lambda path: (-_trainable_tokens(path, excluded), path[-1].index))
    placed: set[str] = set(excluded)
    traces = []
    for path in paths:
        trainable = {call.call_id for call in _of_its_kind(path)} - placed
        placed |= trainable
        if trainable:
            traces.append((path, merge_path(path, trainable)))
    traces.sort(key=lambda item: item[0][0].index)
    return [trace for _, trace in traces]


def _to_the_last_not_excluded(path: list[ModelCall], excluded: Mapping[str, str]) -> list[ModelCall]:
    while path and path[-1].call_id in excluded:
        path.pop()
    return path


def _of_its_kind(path: Sequence[ModelCall]) -> list[ModelCall]:
    return [call for call in path if call.kind == path[-1].kind]


def _trainable_tokens(path: Sequence[ModelCall], excluded: Mapping[str, str]) -> int:
    return sum(len(call.response_ids) for call in _of_its_kind(path) if call.call_id not in excluded)


BUILDER = prefix_merging
