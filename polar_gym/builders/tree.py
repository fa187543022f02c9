"""The conversation tree, by tokens alone.

A call's parent is the earlier call with the longest `prompt_ids + response_ids` that is an exact prefix of the call's
`prompt_ids`. Nothing else joins calls: a child was sampled after exactly the tokens of its parent.

In lexicographic order, all sequences that begin with a given sequence follow directly after it. One pass in that order
therefore finds every parent, if it keeps the sequences that the current one begins with. The cost grows with the tokens
of a session, and not with the square of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polar_gym.schema import ModelCall


@dataclass(slots=True, eq=False)
class Node:
    """A call in the tree."""

    call: ModelCall
    parent: Node | None

    def path(self) -> list[ModelCall]:
        """Return the calls from the root to this one."""
        calls = []
        node: Node | None = self
        while node is not None:
            calls.append(node.call)
            node = node.parent
        return calls[::-1]


def token_tree(calls: Sequence[ModelCall]) -> list[Node]:
    """Return the nodes of all calls that sampled anything, in the order given."""
    nodes = [Node(call, None) for call in calls if len(call.response_ids)]
    for node, parent in zip(nodes, _parents([node.call for node in nodes]), strict=True):
        node.parent = None if parent is None else nodes[parent]
    return nodes


def _parents(calls: Sequence[ModelCall]) -> list[int | None]:
    """Return the place of each call's parent, or None. The sequence of a call begins with its prompt, and so with the
    sequence of its parent."""
    sequences = [b"".join((call.prompt_ids.data, call.response_ids.data)) for call in calls]
    parents: list[int | None] = [None] * len(calls)
    prefixes: list[int] = []
    """The places of the sequences that the current one begins with, each a prefix of the next."""
    for place in sorted(range(len(calls)), key=sequences.__getitem__):
        while prefixes and not sequences[place].startswith(sequences[prefixes[-1]]):
            prefixes.pop()
        prompt = calls[place].prompt_ids.nbytes
        shorter = (prefix for prefix in reversed(prefixes) if prefix < place and len(sequences[prefix]) <= prompt)
        parents[place] = next(shorter, None)
        prefixes.append(place)
    return parents
