"""The final message of a session is the answer that its task is about."""

from __future__ import annotations

from polar_gym.gateway.session.building import final_message
from tests.support.calls import make_call


def test_a_title_that_comes_last_is_not_the_answer() -> None:
    """Guards against a right answer that has no reward, because a title, a summary or a judge's answer came after."""
    answer = make_call(0, [1], [2], response={"content": "42"})
    title = make_call(1, [3], [4], response={"content": "A question"}, hints={"kind": "auxiliary"})
    late = make_call(2, [1, 2], [5], response={"content": "43"}, outcome="abandoned")
    assert final_message([answer, title, late]) == "42"
    assert not final_message([title])
