"""Builders: the calls of a session become a trajectory, whose traces can be trained on.

A plug-in is one module here that defines a function `BUILDER`, a `Builder`. It is a pure function over recorded calls:
no I/O, no clock, no tokenizer. Token ids alone decide which calls are joined in a trace. Hints only name a trace's
kind, and outcomes only exclude a call's tokens.

The other modules are shared by the builders. `tree` joins calls by their tokens, and `trace` makes and verifies one
trace. `exclusions` decides which calls are not trained on, and `fidelity` counts all tokens. `tool_attempts` judges
the tool calls of an answer, and `replay` gathers the recorded choices of the sampler. The room uses `chat`,
`registry` and `schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polar_gym.builders.exclusions import exclusions, rejected
from polar_gym.builders.fidelity import fidelity
from polar_gym.builders.replay import routed_experts
from polar_gym.builders.trace import seen_messages
from polar_gym.builders.tree import token_tree
from polar_gym.registry import Registry
from polar_gym.schema import BuilderSpec, ModelCall, Trace, Trajectory

Builder = Callable[[Sequence[ModelCall], Mapping[str, str]], list[Trace]]
"""(calls in order of arrival, call id -> why its tokens are not trained on) -> traces."""

BUILDERS: Registry[Builder] = Registry("builder", __name__)


def build_trajectory(calls: Sequence[ModelCall], spec: BuilderSpec) -> Trajectory:
    """Return all traces of a session, with the fidelity of its tokens.

    Raises `polar_gym.registry.UnknownNameError` for an unknown builder and `AssertionError` when a builder breaks the
    law that every sampled token is either trainable in exactly one trace or excluded for a named reason.
    """
    ordered = sorted(calls, key=lambda call: call.index)
    excluded = exclusions(ordered, spec)
    builder: Builder = BUILDERS.get(spec.name)
    traces = builder(ordered, excluded)
    by_id = {call.call_id: call for call in ordered}
    for trace in traces:
        last = by_id[trace.call_ids[-1]]
        trace.messages = seen_messages(last, by_id)
        for turn in trace.turns:
            call = by_id[turn.call_id]
            if trace.messages[len(call.messages) : len(call.messages) + 1] == [call.response]:
                turn.message = len(call.messages)
        trace.routed_experts = routed_experts(last, by_id)
    _name_shared_beginnings(traces, ordered)
    return Trajectory(
        builder=spec.name,
        traces=traces,
        fidelity=fidelity(ordered, traces, excluded),
        delivered=[call.call_id for call in ordered if call.outcome == "delivered"],
        rejected=[call_id for call_id in rejected(ordered) if excluded.get(call_id, "rejected") == "rejected"],
        branched=sum(call.branched_from is not None for call in ordered),
    )


def _name_shared_beginnings(traces: Sequence[Trace], calls: Sequence[ModelCall]) -> None:
    """Note in each trace its beginning that another session sampled, also where the trace is of calls of its own."""
    if all(call.branched_from is None for call in calls):
        return
    nodes = {node.call.call_id: node for node in token_tree(calls)}
    for trace in traces:
        for call in nodes[trace.call_ids[-1]].path():
            if call.branched_from is not None:
                trace.branched_from = call.branched_from
                trace.shared_prefix = len(call.prompt_ids) + len(call.response_ids)
