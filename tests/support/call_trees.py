"""Sessions of calls, as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from polar_gym.schema import ModelCall
from tests.support.calls import make_call


@st.composite
def sessions(draw: st.DrawFn) -> list[ModelCall]:
    """Draw calls of which some continue an earlier one exactly, some nearly, and some not at all.

    A tiny vocabulary makes accidental prefixes likely.
    """
    ids = st.lists(st.integers(0, 2), max_size=4)
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, 9))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            base = draw(st.sampled_from(calls))
            prompt = [*base.prompt_ids.tolist(), *base.response_ids.tolist(), *prompt]
            if draw(st.booleans()) and prompt:
                prompt[draw(st.integers(0, len(prompt) - 1))] = 9
        mismatch = ["tool_choice"] if draw(st.integers(0, 5)) == 0 else []
        calls.append(make_call(index, prompt, draw(ids), outcome=draw(OUTCOMES), sampling_mismatch=mismatch))
    return calls


@st.composite
def parallel_sessions(draw: st.DrawFn) -> list[ModelCall]:
    """Draw calls that are in flight at once, of all kinds and threads.

    Many have the same prompt. Some are continued, also by calls that were abandoned.
    """
    ids = st.lists(st.integers(0, 1), max_size=2)
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(1, 10))):
        prompt, parent = draw(ids), None
        if calls and draw(st.booleans()):
            base = draw(st.sampled_from(calls))
            prompt = base.prompt_ids.tolist()
            if draw(st.booleans()):
                prompt += [*base.response_ids.tolist(), *draw(ids)]
                parent = base.call_id
        times = at(float(draw(st.integers(0, 4))), float(draw(st.integers(0, 4))))
        kind = draw(st.sampled_from(["main", "main", "subagent", "compaction", "auxiliary"]))
        hints = {"kind": kind} | draw(st.sampled_from([{}, {"thread": "a"}, {"thread": "b"}]))
        fields = {"parent_id": parent, "hints": hints, "outcome": draw(OUTCOMES), **times}
        calls.append(make_call(index, prompt, draw(ids), **fields))
    return calls


OUTCOMES = st.sampled_from(["delivered", "delivered", "delivered", "abandoned", "failed"])


def at(start: float, duration: float, **fields: Any) -> dict[str, Any]:
    return {"started_at": start, "duration": duration, **fields}
