"""The prefixes that rows share, as a forest: a model runs each shared token once.

    shared = forest(batch.rows)
    print(shared.saving)
    tree, arrays = to_torch(packed(shared)), to_torch(padded(batch.rows, pad_id))

A row is a path from a root. Pass the rows of a group or of a whole batch: samples of a task share its prompt, and the
forks and sub-agents of a session share what they have in common.

Two tokens are one only where ids, weight versions and routed experts agree, at this position and at all before. A token
that a row has as context (of a prompt, of a tool) has no version in that row, and the last token of a row has no
experts. A missing record agrees with any. Rows without routed experts share only with each other.

Losses stay those of rows: a shared token has one logprob, and each row that trains the token has its own weight,
advantage and captured logprob. Therefore the gradient is that of `padded`.

AReaL (tree training and DTA) and TRL 1.16 (`TreeRow`) make trees themselves, of the rows that `padded` and
`trl.rollout_samples` give them. AReaL fills one tree after the other: give it the rows in `Forest.order`. Both go by
token ids alone, which is exact as long as no experts are replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polar_gym.record import TokenIds
from polar_gym.training.row import Row

NO_EXPERTS = 0
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens that some rows share, and no other row of the forest."""

    token_ids: TokenIds
    records: NDArray[np.int64]
    """The numbers of each token's weight version and experts, shape (tokens, 2); `UNKNOWN` where no row has them."""
    start: int
    """The position of the first token in the rows."""
    rows: list[int]
    """The places of the rows in `Forest.rows`."""
    children: list[Node]


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Rows, with their shared prefixes once."""

    rows: Sequence[Row]
    nodes: list[Node]
    """All nodes in depth-first order: each node is followed by its descendants."""

    @property
    def flat_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def saving(self) -> float:
        """Return how many times fewer tokens the forest has than its rows: 1.0 where nothing is shared."""
        return self.flat_tokens / self.tokens if self.nodes else 1.0

    @property
    def order(self) -> list[int]:
        """Return the places of the rows in depth-first order: neighbours share most."""
        ends = {row: number for number, node in enumerate(self.nodes) for row in node.rows}
        return sorted(ends, key=ends.__getitem__)


def forest(rows: Sequence[Row]) -> Forest:
    """Return the forest of the rows. A row goes into an earlier one's path as far as they agree."""
    numbers: dict[Hashable, int] = {None: NO_EXPERTS}
    roots: list[Node] = []
    for place, row in enumerate(rows):
        _insert(roots, Node(row.token_ids, _records(row, numbers), 0, [place], []))
    nodes, stack = [], roots[::-1]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += reversed(node.children)
    return Forest(rows, nodes)


def _records(row: Row, numbers: dict[Hashable, int]) -> NDArray[np.int64]:
    """Return a number for the weight version and for the experts of each token. Equal records have equal numbers."""
    records = np.full((len(row.token_ids), 2), UNKNOWN, np.int64)
    for span in row.weight_versions:
        records[span.start : span.end, 0] = numbers.setdefault((span.version, span.until), len(numbers))
    experts = row.routed_experts
    if experts is None:
        records[:, 1] = NO_EXPERTS
    else:
        records[: len(experts), 1] = [numbers.setdefault(each.tobytes(), len(numbers)) for each in experts]
    return records


def _insert(siblings: list[Node], new: Node) -> None:
    """Add a whole row, and split the last node that the row agrees with only in part."""
    while len(new.token_ids):
        agreements = [_agreement(node, new) for node in siblings]
        shared = max(agreements, default=0)
        if not shared:
            siblings.append(new)
            return
        node = siblings[agreements.index(shared)]
        if shared < len(node.token_ids):
            node.children = [replace(_after(node, shared), rows=[*node.rows])]
            node.token_ids, node.records = node.token_ids[:shared], node.records[:shared]
        node.records = np.maximum(node.records, new.records[:shared])  # a known record instead of a missing one
        node.rows += new.rows
        siblings, new = node.children, _after(new, shared)


def _after(run: Node, tokens: int) -> Node:
    return replace(run, token_ids=run.token_ids[tokens:], records=run.records[tokens:], start=run.start + tokens)


def _agreement(one: Node, other: Node) -> int:
    """Return the number of tokens in which two runs agree from their first token on."""
    length = min(len(one.token_ids), len(other.token_ids))
    if one.token_ids[0] != other.token_ids[0]:
        return 0
    ours, theirs = one.records[:length], other.records[:length]
    agree = ((ours == theirs) | (ours == UNKNOWN) | (theirs == UNKNOWN)).all(1)
    agree &= one.token_ids[:length] == other.token_ids[:length]
    return int(np.append(~agree, True).argmax())


def packed(trees: Forest) -> dict[str, np.ndarray]:
    """Return the forest as one sequence in depth-first order.

    `(tokens,)`: `input_ids`; `position_ids`, the position of each token in its rows; `seen_until`: the token at k is
    seen by those at q where `k <= q < seen_until[k]`. `(rows, length)`: `places`, where each token of a row is in the
    sequence, and 0 after the row's end. All are int64.

    logprobs[r, t] = model(input_ids, position_ids, mask)[places[r, t - 1]].log_softmax(-1)[input_ids[places[r, t]]]
    """
    places = np.zeros((len(trees.rows), max((len(row.token_ids) for row in trees.rows), default=0)), np.int64)
    tokens = np.zeros((3, trees.tokens), np.int64)
    ends: dict[int, int] = {}
    end = trees.tokens
    for node in reversed(trees.nodes):
        start = end - len(node.token_ids)
        positions = np.arange(node.start, node.start + len(node.token_ids))
        places[np.ix_(node.rows, positions)] = np.arange(start, end)
        ends[id(node)] = ends[id(node.children[-1])] if node.children else end
        tokens[0, start:end], tokens[1, start:end], tokens[2, start:end] = node.token_ids, positions, ends[id(node)]
        end = start
    return {"input_ids": tokens[0], "position_ids": tokens[1], "seen_until": tokens[2], "places": places}
