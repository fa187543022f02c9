"""Weight versions as the trainer sets them and as the engine labels them, and where they go in a merged trace."""

from __future__ import annotations

import orjson
import pytest

from polar_gym.builders.trace import merge_path
from polar_gym.engines.vllm.stream import weight_versions
from polar_gym.engines.weights import BEGUN_ANEW, spans
from polar_gym.schema import ModelCall, WeightVersion
from tests.support.calls import make_call


def engine_says(*labels: str) -> list[WeightVersion]:
    """Spans of two tokens each, as the engine names them."""
    named = [{"version": label, "start": 2 * place, "end": 2 * place + 2} for place, label in enumerate(labels)]
    return weight_versions({"weight_versions": named})


@pytest.mark.parametrize(
    ("began", "ended", "tokens", "made"),
    [
        (None, None, 3, []),
        ("1", "1", 0, []),
        ("1", "1", 3, [("1", None)]),
        ("1", "2", 3, [("1", "2")]),
        (None, "1", 3, [("initial", "1")]),
        ("1", None, 3, [("1", BEGUN_ANEW)]),  # the server is back, and no trainer has named its weights yet
    ],
)
def test_without_a_label_of_the_engine_an_estimate_is_one_span(
    began: str | None, ended: str | None, tokens: int, made: list[tuple[str, str | None]]
) -> None:
    estimated = spans([], began, ended, tokens)
    assert [(span.version, span.until) for span in estimated] == made
    assert all((span.start, span.end, span.estimated) == (0, tokens, True) for span in estimated)
    assert all(span.engine_version is None for span in estimated)


@pytest.mark.parametrize(
    ("labels", "began", "ended", "made"),
    [
        (["default"], None, None, [("default", False, None)]),
        (["default"], "A", "A", [("A", True, None)]),
        (["default"], "A", "B", [("A", True, "B")]),
        (["default"], None, "A", [("default", True, "A")]),
        (["default"], "A", None, [("A", True, BEGUN_ANEW)]),
        (["A"], "A", "A", [("A", False, None)]),
        (["A"], "A", "B", [("A", False, None)]),
        (["B"], "A", "B", [("B", False, None)]),
        (["A", "B"], "A", "B", [("A", False, None), ("B", False, None)]),
        (["default", "B"], None, "B", [("default", True, None), ("B", False, None)]),
        (["0", "1"], "1", "2", [("1", True, None), ("2", True, None)]),
        (["7", "8"], "A", "B", [("A", True, None), ("B", True, None)]),
        (["B", "C"], "A", "C", [("A", True, "C"), ("C", False, None)]),  # it waited in the engine's queue under A
        (["7", "8"], "A", "A", [("A", True, None), ("A", True, "8")]),  # loaded, and not named yet
        (["old", "A"], "A", "A", [("A", True, None), ("A", False, None)]),  # named, and loaded late
        (["7", "8", "9"], "A", "C", [("A", True, None), ("A", True, "C"), ("C", True, None)]),
    ],
)
def test_the_trainers_version_counts_and_the_engines_label_stands_beside_it(
    labels: list[str], began: str | None, ended: str | None, made: list[tuple[str, bool, str | None]]
) -> None:
    """Guards against an engine that calls its weights `default` for all time, and is believed."""
    told = engine_says(*labels)
    named = spans(told, began, ended, 2 * len(labels))
    assert [(span.version, span.estimated, span.until) for span in named] == made
    assert [span.engine_version for span in named] == labels
    assert [(span.start, span.end, span.older_cache) for span in named] == [
        (span.start, span.end, span.older_cache) for span in told
    ]


def test_a_record_from_before_there_were_two_labels_is_read() -> None:
    call = make_call(0, [1], [2, 3])
    call.weight_versions = [WeightVersion(version="7", start=0, end=2)]
    line = orjson.loads(call.to_json())
    del line["weight_versions"][0]["engine_version"]
    (span,) = ModelCall.from_json(orjson.dumps(line)).weight_versions
    assert (span.version, span.engine_version) == ("7", None)


def test_what_was_sampled_after_an_update_in_the_middle_of_a_call_is_stamped() -> None:
    """Its cache is of the weights before; and a field that another vLLM may add to a span breaks nothing."""
    said = [{"version": "1", "start": 0, "end": 2, "new": True}, {"version": "2", "start": 2, "end": 5}]
    old, new = weight_versions({"weight_versions": said})
    assert (old.version, old.start, old.end, old.older_cache) == ("1", 0, 2, False)
    assert (new.version, new.start, new.end, new.older_cache) == ("2", 2, 5, True)
    call = make_call(0, [1, 2], [3, 4, 5, 6, 7])
    call.weight_versions = [old, new]
    assert [span.older_cache for span in merge_path([call], {call.call_id}).weight_versions] == [False, True]


def test_a_trace_keeps_what_is_known_of_its_spans() -> None:
    first, second = make_call(0, [1, 2], [3, 4]), make_call(1, [1, 2, 3, 4, 5], [6, 7, 8])
    first.weight_versions = spans([], "1", "2", 2)
    second.weight_versions = [WeightVersion(version="2", start=0, end=1), WeightVersion(version="3", start=1, end=3)]
    trace = merge_path([first, second], {first.call_id, second.call_id})
    assert trace.weight_versions == [
        WeightVersion(version="1", start=0, end=2, estimated=True, until="2"),
        WeightVersion(version="2", start=3, end=4),
        WeightVersion(version="3", start=4, end=6),
    ]
