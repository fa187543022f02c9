"""Weight versions where the engine does not say them, and where they go in a merged trace."""

from __future__ import annotations

import pytest

from polar_gym.inference.vllm_stream import weight_versions
from polar_gym.inference.weights import estimated
from polar_gym.schema import WeightVersion
from polar_gym.trajectory.trace import merge_path
from tests.unit.calls import make_call


@pytest.mark.parametrize(
    ("began", "ended", "tokens", "spans"),
    [
        (None, None, 3, []),
        ("1", "1", 0, []),
        ("1", "1", 3, [("1", None)]),
        ("1", "2", 3, [("1", "2")]),
        (None, "1", 3, [("initial", "1")]),
    ],
)
def test_an_estimate_is_one_span_with_what_is_known(
    began: str | None, ended: str | None, tokens: int, spans: list[tuple[str, str | None]]
) -> None:
    made = estimated(began, ended, tokens)
    assert [(span.version, span.until) for span in made] == spans
    assert all((span.start, span.end, span.estimated) == (0, tokens, True) for span in made)


def test_what_was_sampled_after_an_update_in_the_middle_of_a_call_is_stamped() -> None:
    """Its cache is of the weights before; and a field that another vLLM may add to a span breaks nothing."""
    spans = [{"version": "1", "start": 0, "end": 2, "new": True}, {"version": "2", "start": 2, "end": 5}]
    old, new = weight_versions({"weight_versions": spans})
    assert (old.version, old.start, old.end, old.older_cache) == ("1", 0, 2, False)
    assert (new.version, new.start, new.end, new.older_cache) == ("2", 2, 5, True)
    call = make_call(0, [1, 2], [3, 4, 5, 6, 7])
    call.weight_versions = [old, new]
    assert [span.older_cache for span in merge_path([call], {call.call_id}).weight_versions] == [False, True]


def test_a_trace_keeps_what_is_known_of_its_spans() -> None:
    first, second = make_call(0, [1, 2], [3, 4]), make_call(1, [1, 2, 3, 4, 5], [6, 7, 8])
    first.weight_versions = estimated("1", "2", 2)
    second.weight_versions = [WeightVersion(version="2", start=0, end=1), WeightVersion(version="3", start=1, end=3)]
    trace = merge_path([first, second], {first.call_id, second.call_id})
    assert trace.weight_versions == [
        WeightVersion(version="1", start=0, end=2, estimated=True, until="2"),
        WeightVersion(version="2", start=3, end=4),
        WeightVersion(version="3", start=4, end=6),
    ]
