"""The server's record of its nodes: which processes live, what was placed on them, and what they can still take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.protocol import Heartbeat, StageCounts
from polar_gym.schema import EngineInfo, Session
from polar_gym.service.fleet import REMEMBERED_INCARNATIONS, Fleet, Member, ReplacedError
from polar_gym.service.task import Placement


def heartbeat(node: str = "a", incarnation: str = "1", holding: tuple[str, ...] = (), **fields: Any) -> Heartbeat:
    values = {
        "node": node,
        "url": f"http://{node}:8701",
        "incarnation": incarnation,
        "engine": EngineInfo(name="vllm", model="m", max_model_len=100),
        "engine_key": "e",
        "places": StageCounts(init=1, ready=1, run=2, postrun=1),
        "held": StageCounts(run=len(holding)),
        "sessions": [Session(session_id=each, task_id="t", sample_index=0, harness="pi") for each in holding],
        **fields,
    }
    return Heartbeat(**values)


def placement(session_id: str, node: str = "a", incarnation: str = "1") -> Placement:
    return Placement(session_id, 0, node, incarnation)


def fleet_of(*nodes: str) -> Fleet:
    """Return a fleet whose nodes were first heard of at time 0."""
    fleet = Fleet()
    for node in nodes:
        fleet.beat(heartbeat(node), 0.0)
    return fleet


def total(member: Member) -> int:
    return member.free_places().total


def test_a_silent_node_is_taken_out_when_its_lease_is_over() -> None:
    fleet = fleet_of("a", "b")
    fleet.beat(heartbeat("b"), 4.0)
    assert fleet.take_silent(5.0, 5.0) == []
    assert [member.heartbeat.node for member in fleet.take_silent(5.1, 5.0)] == ["a"]
    assert fleet.members.keys() == {"b"}


def test_a_node_whose_heartbeat_is_being_read_is_not_silent() -> None:
    """Guards against living nodes that are taken for dead while their heartbeats wait for a thread, and against a
    replaced process whose refused heartbeats keep its dead successor alive."""
    fleet = fleet_of("a")
    with fleet.reading("a"), fleet.reading("unknown"):
        assert fleet.take_silent(60.0, 5.0) == []
    assert [member.heartbeat.node for member in fleet.take_silent(60.0, 5.0)] == ["a"]


def test_time_in_which_the_server_stood_still_is_no_silence() -> None:
    fleet = fleet_of("a")
    fleet.excuse(60.0)
    assert fleet.take_silent(64.0, 5.0) == []
    assert [state.silent_seconds for state in fleet.states(50.0)] == [0.0], "never negative"


def test_a_new_process_replaces_the_old_one_which_is_refused_from_then_on() -> None:
    fleet = fleet_of("a")
    old = fleet.members["a"]
    assert fleet.beat(heartbeat(incarnation="1"), 1.0) is None
    assert fleet.beat(heartbeat(incarnation="2"), 2.0) is old
    with pytest.raises(ReplacedError, match=r"node='a': another process took this name; give every node a name of its"):
        fleet.beat(heartbeat(incarnation="1"), 3.0)
    assert fleet.members["a"].heartbeat.incarnation == "2"


def test_a_node_that_was_only_silent_may_come_back() -> None:
    fleet = fleet_of("a")
    fleet.take_silent(10.0, 5.0)
    assert fleet.beat(heartbeat(), 11.0) is None
    assert fleet.members.keys() == {"a"}


def test_a_process_that_is_known_to_be_dead_is_refused_and_another_one_is_not_taken_for_it() -> None:
    fleet = fleet_of("a")
    assert fleet.take("a", "another") is None
    assert fleet.take("unknown", None) is None
    dead = fleet.take("a", "1")
    assert dead is not None
    assert dead.heartbeat.incarnation == "1"
    with pytest.raises(ReplacedError):
        fleet.beat(heartbeat(), 1.0)
    fleet.beat(heartbeat(incarnation="2"), 2.0)
    assert fleet.take("a", None) is not None, "None names the last process"


def test_a_bounded_number_of_dead_processes_is_remembered() -> None:
    fleet = Fleet()
    for number in range(REMEMBERED_INCARNATIONS + 2):
        fleet.beat(heartbeat(incarnation=str(number)), 0.0)
    with pytest.raises(ReplacedError):
        fleet.beat(heartbeat(incarnation="1"), 1.0)
    assert fleet.beat(heartbeat(incarnation="0"), 1.0) is not None


def test_a_session_on_its_way_takes_a_place_until_the_heartbeat_tells_of_it() -> None:
    fleet = fleet_of("a")
    member = fleet.members["a"]
    assert total(member) == 4
    member.place(placement("s"))
    assert total(member) == 3
    fleet.beat(heartbeat(holding=("s",)), 1.0)
    assert total(member) == 3, "counted once"
    fleet.forget(placement("s"))
    fleet.beat(heartbeat(), 2.0)
    assert total(member) == 4


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.sampled_from("xyz")),
        st.tuples(st.just("forget"), st.sampled_from("xyz")),
        st.tuples(st.just("beat"), st.sets(st.sampled_from("xyz"))),
    )
)


@given(STEPS)
def test_what_is_on_its_way_is_what_was_placed_and_not_told(steps: list[tuple[str, Any]]) -> None:
    fleet = fleet_of("a")
    member = fleet.members["a"]
    for step, what in steps:
        if step == "place":
            member.place(placement(what))
        elif step == "forget":
            fleet.forget(placement(what))
        else:
            fleet.beat(heartbeat(holding=tuple(what)), 1.0)
        assert member.on_their_way == member.placed.keys() - member.held.keys()
        assert member.has_room == (total(member) > 0)


def test_a_node_that_drains_or_has_refused_is_given_nothing() -> None:
    fleet = fleet_of("a")
    member = fleet.members["a"]
    member.full = True
    assert total(member) == 0
    fleet.beat(heartbeat(), 1.0)
    assert total(member) == 4, "until its next heartbeat"
    member.draining = True
    assert total(member) == 0
    assert [state.draining for state in fleet.states(1.0)] == [True]


def test_a_failing_node_is_tried_with_one_session_at_a_time() -> None:
    fleet = fleet_of("a")
    member = fleet.members["a"]
    member.failing = True
    assert total(member) == 1
    member.place(placement("s"))
    assert total(member) == 0


def test_an_acknowledged_session_is_missing_after_the_second_heartbeat_without_it() -> None:
    """The first one may have been made before the acknowledgement."""
    fleet = fleet_of("a")
    member = fleet.members["a"]
    member.place(placement("lost"), member.beats)
    member.place(placement("kept"), member.beats)
    member.place(placement("sent"))
    fleet.beat(heartbeat(holding=("kept",)), 1.0)
    assert member.missing() == []
    fleet.beat(heartbeat(holding=("kept",)), 2.0)
    assert member.missing() == [placement("lost")]


def test_a_placement_names_one_process_of_a_node() -> None:
    fleet = fleet_of("a")
    fleet.beat(heartbeat(incarnation="2"), 1.0)
    assert fleet.at(placement("s", incarnation="1")) is None
    assert fleet.at(placement("s", incarnation="2")) is fleet.members["a"]
