"""The conversation tree, by tokens alone.

A call's parent is the earlier call with the longest `prompt_ids + response_ids` that is an exact prefix of its own
`prompt_ids`. Nothing else joins calls: a child of a parent was sampled under exactly the parent's tokens.

In lexicographic order whatever begins with a sequence follows it at once, so one pass over all sequences in that order,
with those in hand that the current one begins with, finds every parent: a session of a thousand calls costs what its
tokens do, and not the square of its calls.
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
        """Calls from the root to this one."""
        calls = []
        node: Node | None = self
        while node is not None:
            calls.append(node.call)
            node = node.parent
        return calls[::-1]


def token_tree(calls: Sequence[ModelCall]) -> list[Node]:
    """The nodes of all calls that sampled anything, in the order given."""
    nodes = [Node(call, None) for call in calls if len(call.response_ids)]
    for node, parent in zip(nodes, _parents([node.call for node in nodes]), strict=True):
        node.parent = None if parent is None else nodes[parent]
    return nodes


def _parents(calls: Sequence[ModelCall]) -> list[int | None]:
    """For each call the place of its parent. A call's own sequence begins with its prompt, hence with its parent's."""
    sequences = [b"".join((call.prompt_ids.data, call.response_ids.data)) for call in calls]
    parents: list[int | None] = [None] * len(calls)
    prefixes: list[int] = []
    """Places of the sequences that the current one begins with, each of them a prefix of the next."""
    for place in sorted(range(len(calls)), key=sequences.__getitem__):
        while prefixes and not sequences[place].startswith(sequences[prefixes[-1]]):
            prefixes.pop()
        prompt = calls[place].prompt_ids.nbytes
        shorter = (prefix for prefix in reversed(prefixes) if prefix < place and len(sequences[prefix]) <= prompt)
        parents[place] = next(shorter, None)
        prefixes.append(place)
    return parents
