"""Laws of the scheduler: capacity, no idling, turns, and engines that are preferred but never waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from polar_gym.gateway.session.turns import FairQueue
from polar_gym.protocol import Heartbeat, StageCounts
from polar_gym.schema import EngineInfo
from polar_gym.service.scheduler import FreePlaces, Offers, plan


def choose(
    nodes: Iterable[FreePlaces], preferred_engine: str | None, record_at: str | None = None
) -> FreePlaces | None:
    """Return the node for one session, by looking at each."""
    free = [node for node in nodes if node.total > 0]
    if not free:
        return None
    candidates = with_place = [node for node in free if node.running > 0] or free
    candidates = [node for node in candidates if node.engine_key == preferred_engine] or candidates
    candidates = [node for node in with_place if node.name == record_at] or candidates
    return max(candidates, key=lambda node: (node.running, node.total))


free_places = st.lists(
    st.builds(
        FreePlaces,
        name=st.text("abcdef", min_size=1, max_size=3),
        engine_key=st.sampled_from(["x", "y", "z"]),
        running=st.integers(-3, 4),
        total=st.integers(0, 8),
    ),
    max_size=6,
    unique_by=lambda node: node.name,
)
tasks = st.lists(st.integers(1, 12), max_size=6)
"""How many sessions each task has."""


def queue_of(sizes: list[int]) -> FairQueue[str]:
    queue = FairQueue[str]()
    for task, size in enumerate(sizes):
        for session in range(size):
            queue.push(f"t{task}", f"t{task}-{session}")
    return queue


@given(free_places, st.lists(st.tuples(st.sampled_from("wxyz"), st.text("abcdef", max_size=3)), max_size=30))
def test_each_session_gets_the_node_that_a_look_at_all_would_choose(
    nodes: list[FreePlaces], sessions: list[tuple[str, str]]
) -> None:
    left, offers = {node.name: node for node in nodes}, Offers(nodes)
    for preferred, record_at in sessions:
        chosen = offers.choose(preferred, record_at)
        assert chosen == choose(left.values(), preferred, record_at)
        if chosen is None:
            break
        offers.take(chosen)
        left[chosen.name] = chosen.with_one_more()


@given(free_places, tasks)
def test_capacity_is_respected_and_nothing_waits_while_a_place_is_free(
    nodes: list[FreePlaces], sizes: list[int]
) -> None:
    queue = queue_of(sizes)
    given_to = Counter(assignment.node for assignment in plan(nodes, queue, {}))
    capacity = {node.name: node.total for node in nodes}
    assert all(count <= capacity[node] for node, count in given_to.items())
    assert given_to.total() == min(sum(sizes), sum(capacity.values()))
    assert len(queue) == sum(sizes) - given_to.total()


@given(free_places, tasks)
def test_tasks_take_turns_and_their_sessions_stay_in_order(nodes: list[FreePlaces], sizes: list[int]) -> None:
    assignments = plan(nodes, queue_of(sizes), {})
    for task, size in enumerate(sizes):
        own = [assignment.session_id for assignment in assignments if assignment.task_id == f"t{task}"]
        assert own == [f"t{task}-{session}" for session in range(len(own))]
        for other, _ in enumerate(sizes):
            others = sum(assignment.task_id == f"t{other}" for assignment in assignments)
            assert len(own) == size or others <= len(own) + 1, "nobody is served twice before a waiting one once"


@given(free_places, tasks, st.dictionaries(st.sampled_from([f"t{n}" for n in range(6)]), st.sampled_from("xyz")))
def test_a_session_never_waits_for_its_engine_while_another_node_is_idle(
    nodes: list[FreePlaces], sizes: list[int], engines: dict[str, str]
) -> None:
    left = {node.name: node for node in nodes}
    for assignment in plan(nodes, queue_of(sizes), engines):
        chosen = left[assignment.node]
        idle = [node for node in left.values() if node.running > 0 and node.total > 0]
        assert not idle or chosen in idle
        equals = idle or [node for node in left.values() if node.total > 0]
        preferred = engines.get(assignment.task_id)
        if any(node.engine_key == preferred for node in equals):
            assert chosen.engine_key == preferred, "its own engine, where that costs no waiting"
        engines.setdefault(assignment.task_id, chosen.engine_key)
        left[assignment.node] = chosen.with_one_more()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from("abc"), st.booleans()),
            st.tuples(st.just("pop"), st.none(), st.none()),
            st.tuples(st.just("remove"), st.sampled_from("abc"), st.none()),
        ),
        max_size=40,
    )
)
def test_the_queue_gives_back_each_session_once_or_forgets_it(steps: list[tuple[str, str, bool]]) -> None:
    queue, waiting = FairQueue[str](), dict[str, str]()
    for number, (step, task, first) in enumerate(steps):
        if step == "push":
            queue.push(task, f"s{number}", first=first)
            waiting[f"s{number}"] = task
        elif step == "pop" and waiting:
            assert queue.peek() is not None
            head = queue.peek()
            task_id, session_id = queue.pop()
            assert head == (task_id, session_id)
            assert waiting.pop(session_id) == task_id
        elif step == "remove":
            gone = [session_id for session_id, owner in waiting.items() if owner == task][:1]
            queue.remove(task, gone)
            for session_id in gone:
                del waiting[session_id]
        assert len(queue) == len(waiting)
        assert (queue.peek() is None) == (not waiting)


def test_the_node_with_most_free_places_by_stage() -> None:
    prepared_only = FreePlaces("big", "x", running=0, total=9)
    small = FreePlaces("small", "x", running=1, total=1)
    assert Offers([prepared_only, small]).choose(None) == small, "a place to run comes before many to be prepared in"
    assert Offers([prepared_only, FreePlaces("full", "x", running=4, total=0)]).choose(None) == prepared_only
    assert Offers([]).choose(None) is None


def test_free_places_count_what_is_held_on_its_way_and_not_yet_graded() -> None:
    beat = Heartbeat(
        node="a",
        url="http://a",
        incarnation="1",
        engine=EngineInfo(name="e", model="m", max_model_len=1),
        engine_key="e",
        places=StageCounts(init=1, ready=2, run=4, postrun=1),
        held=StageCounts(init=1, ready=0, run=2, postrun=3),
        waiting=1,
    )
    free = FreePlaces.of(beat, dispatched_since=1)
    assert free.running == 4 - (1 + 2 + 1 + 1)
    assert free.total == (1 + 2 + 4) - (1 + 2 + 1 + 1) - (3 - 1), "a backlog of grading takes places away"
    assert FreePlaces.of(beat.model_copy(update={"draining": True})).total == 0


@given(free_places, st.text("abcdef", min_size=1, max_size=3))
def test_a_session_goes_to_the_node_with_its_record_unless_it_would_wait_there(
    nodes: list[FreePlaces], record_at: str
) -> None:
    chosen = Offers(nodes).choose(None, record_at)
    first = Offers(nodes).choose(None)
    assert (chosen is None) == (first is None)
    if chosen is None or first is None:
        return
    assert (chosen.running > 0) == (first.running > 0)
    same = [node for node in nodes if node.name == record_at and node.total > 0]
    if same and (same[0].running > 0 or first.running <= 0):
        assert chosen == same[0]
