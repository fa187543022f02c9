"""The run page's row of an episode."""

from __future__ import annotations

from polar_gym.schema import Replayed
from polar_gym.view.summary import summary
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def test_recorded_calls_have_no_part_in_the_time_of_a_session() -> None:
    """Guards against a session that went on a day later, and whose bar lay where its first run was."""
    replayed = Replayed(session_id="s", owned=True)
    recorded = make_call(0, [1], [2]).model_copy(update={"started_at": 1.0, "duration": 9.0, "replayed": replayed})
    own = recorded.model_copy(update={"started_at": 86401.0, "duration": 2.0, "replayed": None})
    episode = make_episode("1", 1.0)
    row = summary("run.jsonl", episode, episode.trajectory, [recorded, own])
    assert (row["started"], row["latency"]) == (86401.0, [2.0])
    assert summary("run.jsonl", episode, episode.trajectory, [recorded])["started"] is None
