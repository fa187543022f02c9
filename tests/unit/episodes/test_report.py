"""The summary of a run: counts that a user must see."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from polar_gym.episodes.report import print_summary, why_it_begins
from polar_gym.schema import ModelCall, OwnGrammar, Score, ToolAttempt
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def summary(*calls: ModelCall, own_grammar: OwnGrammar | None = None, attempts: Sequence[ToolAttempt] = ()) -> str:
    written, episode = io.StringIO(), make_episode("s", 1.0, calls)
    episode.engine.own_grammar = own_grammar
    episode.trajectory.tool_attempts = list(attempts)
    print_summary([episode], Console(file=written, width=200))
    return written.getvalue()


def test_calls_that_wanted_one_tool_call_at_most_are_counted() -> None:
    wanting, other = make_call(0, [1], [2], single_tool_call=True), make_call(1, [3], [4])
    assert "\n1 calls asked for one tool call at most" in summary(wanting, other)
    assert "one tool call" not in summary(other)


def test_answers_that_came_back_in_other_words_are_counted_once() -> None:
    said = make_call(0, [1], [2])
    later = [
        make_call(i, [1, 2, 3], [4], parent_id="call0", continuation="spliced", edited_answers={"call0": ["text"]})
        for i in (1, 2)
    ]
    assert "\n1 answers came back from the harness in other words" in summary(said, *later)
    assert "in other words" not in summary(said, later[0].model_copy(update={"continuation": "canonical"}))


def test_tool_calls_are_counted_by_what_was_made_of_them() -> None:
    attempts = [ToolAttempt(call_id="c", status=status) for status in ("malformed", "ok", "malformed")]
    assert "\ntool calls: 2 malformed, 1 ok\n" in summary(attempts=attempts)
    assert "\ntool calls: none\n" in summary()


def test_a_grammar_of_the_engines_own_is_shown() -> None:
    shown = "1 episodes are of an engine with a grammar of its own"
    assert [shown in summary(own_grammar=found) for found in (None, "none", "tools", "all")] == [
        False,
        False,
        True,
        True,
    ]


def test_online_scores_and_their_costs_are_shown() -> None:
    scored = make_call(0, [1] * 90, [2] * 10)
    scored.scores = [
        Score(by="engine", read=100, tokens=10, mean_abs=0.01, max_abs=0.5),
        Score(by="reference", read=100, tokens=10, mean_abs=0.02, max_abs=0.4),
    ]
    void = make_call(1, [1] * 110, [3], scores=[Score(by="engine", read=111, problem="weights_changed")])
    said = summary(scored, void)
    assert "scored again: 2 times" in said
    assert "for 105.5% of prefill, |Δ| of the worst: mean 2.00e-02, max 4.00e-01; 1 not: weights_changed" in said
    assert "scored again" not in summary(make_call(0, [1], [2]))


def test_every_fork_has_its_cause() -> None:
    """Guards against a second main trace without a word, where no prefix broke: a harness that went back a turn."""
    calls = [
        make_call(0, [1], [2]),
        make_call(1, [1, 2, 3], [4], parent_id="call0", continuation="spliced"),
        make_call(2, [1, 2, 5], [6], parent_id="call0", continuation="spliced"),
        make_call(3, [1, 9], [7], parent_id="call0", continuation="canonical", splice_cause="history"),
        make_call(4, [8], [8]),
    ]
    trajectory, seen, said = make_episode("s", 1.0, calls).trajectory, set[str](), {}
    for trace in trajectory.traces:
        said[trace.call_ids[-1]] = why_it_begins(trace, seen, trajectory.fidelity)
        seen.update(trace.call_ids)
    assert said == {
        "call1": "",
        "call2": "forks after call 1 of an earlier trace: the harness sent another continuation",
        "call3": "forks: the token prefix broke at position 1: history",
        "call4": "",
    }
