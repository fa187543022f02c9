"""The laws of the relay's multiplexer, whatever the order of calls and wherever the stream is cut."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polar_gym.runtimes.relay import multiplex
from polar_gym.runtimes.relay.multiplex import (
    LARGEST,
    UNACKNOWLEDGED,
    WINDOW,
    Data,
    Ended,
    Multiplexer,
    MultiplexError,
    Opened,
    Reset,
)

ENDS = st.sampled_from([0, 1])
PICKS = st.integers(0, 10**6)


class Multiplexed(RuleBasedStateMachine):
    """Two ends, and a stream that carries any number of bytes at a time and may be cut at any byte."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = (Multiplexer(inside=True), Multiplexer(inside=False))
        self.wires = [bytearray(), bytearray()]
        """What each end has sent, and the other has not had."""
        self.up = False
        self.sent: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        """(end, connection) -> the bytes that the end sent."""
        self.came: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        """(end, connection) -> the bytes that the other end got."""
        self.unread: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.open: tuple[set[int], set[int]] = (set(), set())
        self.ended: set[tuple[int, int]] = set()
        self.told_end: set[tuple[int, int]] = set()
        self.reset: set[int] = set()

    @rule(end=ENDS)
    def open_one(self, end: int) -> None:
        self.open[end].add(self.ends[end].open())

    @rule(end=ENDS, pick=PICKS, content=st.binary(min_size=1, max_size=40), times=st.sampled_from([1, 1, 2000]))
    def send(self, end: int, pick: int, content: bytes, times: int) -> None:
        if (number := self.pick(end, pick)) is None or (end, number) in self.ended:
            return
        content *= times
        while content and (room := self.ends[end].room(number)):
            self.ends[end].send(number, content[:room])
            self.sent[end, number] += content[:room]
            content = content[room:]

    @rule(end=ENDS, pick=PICKS)
    def end_one(self, end: int, pick: int) -> None:
        if (number := self.pick(end, pick)) is not None:
            self.ends[end].end(number)
            self.ended.add((end, number))

    @rule(end=ENDS, pick=PICKS)
    def reset_one(self, end: int, pick: int) -> None:
        if (number := self.pick(end, pick)) is not None:
            self.ends[end].reset(number)
            self.open[end].discard(number)
            self.reset.add(number)

    @rule(end=ENDS, pick=PICKS, size=st.integers(1, WINDOW))
    def use(self, end: int, pick: int, size: int) -> None:
        if number := self.pick(end, pick):
            self.use_up(end, number, size)

    @precondition(lambda self: not self.up)
    @rule()
    def connect(self) -> None:
        self.up = True
        for end in self.ends:
            end.connect()

    @precondition(lambda self: self.up)
    @rule()
    def cut(self) -> None:
        """The bytes on their way are lost."""
        self.up = False
        for wire, end in zip(self.wires, self.ends, strict=True):
            wire.clear()
            end.disconnect()

    @precondition(lambda self: self.up)
    @rule(end=ENDS, size=st.sampled_from([1, 5, 20, 1000, 10**7]))
    def carry(self, end: int, size: int) -> None:
        self.wires[end] += self.ends[end].take()
        piece = bytes(self.wires[end][:size])
        del self.wires[end][:size]
        other = 1 - end
        for event in self.ends[other].feed(piece):
            key = (end, event.number)
            if isinstance(event, Opened):
                self.open[other].add(event.number)
            elif isinstance(event, Data):
                assert key not in self.told_end
                self.came[key] += event.content
                self.unread[other, event.number] += len(event.content)
            elif isinstance(event, Ended):
                assert self.came[key] == self.sent[key], "an end comes after all bytes"
                self.told_end.add(key)
            else:
                assert isinstance(event, Reset)
                assert event.number in self.reset
                self.open[other].discard(event.number)

    @invariant()
    def bytes_come_as_they_were_sent(self) -> None:
        for key, content in self.came.items():
            assert self.sent[key].startswith(content)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert all(size <= WINDOW for size in self.unread.values())
        assert all(end._kept_size <= UNACKNOWLEDGED + 2 * LARGEST for end in self.ends)

    def teardown(self) -> None:
        """Where all is read and a stream is up, all bytes come."""
        if not self.up:
            self.connect()
        before = None
        while before != (before := (sum(map(len, self.came.values())), len(self.told_end))) or any(self.wires):
            for end in (0, 1, 0, 1):
                self.carry(end, 10**7)
                for number in self.open[end]:
                    self.use_up(end, number, WINDOW)
        for (end, number), content in self.sent.items():
            if number not in self.reset:
                assert self.came[end, number] == content
        assert {key for key in self.ended if key[1] not in self.reset} <= self.told_end

    def pick(self, end: int, pick: int) -> int | None:
        numbers = sorted(self.open[end])
        return numbers[pick % len(numbers)] if numbers else None

    def use_up(self, end: int, number: int, size: int) -> None:
        size = min(size, self.unread[end, number])
        self.unread[end, number] -= size
        self.ends[end].used(number, size)


TestMultiplexed = Multiplexed.TestCase


def linked() -> tuple[Multiplexer, Multiplexer]:
    """Two ends that have greeted each other."""
    inside, outside = Multiplexer(inside=True), Multiplexer(inside=False)
    inside.connect()
    outside.connect()
    assert inside.feed(outside.take()) == outside.feed(inside.take()) == []
    return inside, outside


def test_a_sender_waits_for_a_reader_that_reads_nothing() -> None:
    inside, outside = linked()
    number, sent = inside.open(), 0
    while room := inside.room(number):
        inside.send(number, bytes(room))
        sent += room
        outside.feed(inside.take())
        inside.feed(outside.take())
    assert sent == WINDOW


def test_many_senders_wait_for_a_stream_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a gateway whose memory grows with what sandboxes send while their streams are down."""
    monkeypatch.setattr(multiplex, "UNACKNOWLEDGED", 3 * WINDOW)
    inside, _ = linked()
    sent = 0
    for number in [inside.open() for _ in range(10)]:
        while room := inside.room(number):
            inside.send(number, bytes(room))
            sent += room
    assert 2 * WINDOW < sent <= 3 * WINDOW


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([(multiplex.HELLO, 0, bytes(8))], "HELLO"),
        ([(multiplex.HELLO, 0, bytes(3))], "kind 0 has 3 bytes"),
        ([(9, 1, b"")], "kind 9"),
        ([(multiplex.DATA, 1, bytes(LARGEST + 1))], f"has {LARGEST + 1} bytes"),
        ([(multiplex.OPEN, 2, b"")], "connection 2 is not the other end's"),
        ([(multiplex.OPEN, 3, b""), (multiplex.OPEN, 1, b"")], "connection 1 is not"),
        ([(multiplex.OPEN, 1, b""), (multiplex.END, 1, b""), (multiplex.DATA, 1, b"a")], "goes on after its end"),
        ([(multiplex.OPEN, 1, b""), *[(multiplex.DATA, 1, bytes(LARGEST))] * 9], "more bytes than it has room"),
        ([(multiplex.OPEN, 1, b""), (multiplex.CREDIT, 1, bytes([0, 0, 0, 1]))], "more credit"),
        ([(multiplex.ACK, 0, bytes([0] * 7 + [9]))], "has 9 bytes, and this one is at 0"),
    ],
)
def test_an_end_that_breaks_the_protocol_is_refused(frames: list[tuple[int, int, bytes]], problem: str) -> None:
    """Guards against sandboxes that make the gateway hold more than its share, or speak for others."""
    _, outside = linked()
    with pytest.raises(MultiplexError, match=problem):
        outside.feed(b"".join(multiplex._frame(*frame) for frame in frames))


def test_an_end_that_forgot_the_connections_is_refused() -> None:
    """Guards against a relay that was started again in the middle of a session, whose calls would be mixed up."""
    inside, outside = linked()
    inside.open()
    outside.feed(inside.take())
    inside.feed(outside.take())
    inside.connect()
    with pytest.raises(MultiplexError, match="has 0 bytes, and this one is at 9"):
        inside.feed((fresh := Multiplexer(inside=False)).connect() or fresh.take())


def test_who_opens_without_end_is_reset_and_then_refused() -> None:
    inside, outside = linked()
    opens = [multiplex._frame(multiplex.OPEN, 2 * number + 1) for number in range(2 * UNACKNOWLEDGED // 9 + 1100)]
    assert len(outside.feed(b"".join(opens[:2000]))) == multiplex.CONNECTIONS
    with pytest.raises(MultiplexError, match="acknowledges nothing"):
        outside.feed(b"".join(opens[2000:]))
    for _ in range(multiplex.CONNECTIONS):
        inside.open()
    with pytest.raises(ConnectionResetError, match="1024 connections are open"):
        inside.open()


@pytest.mark.parametrize("opener", [0, 1], ids=["inside", "outside"])
def test_the_connections_of_one_end_do_not_keep_the_other_from_opening(opener: int) -> None:
    """Guards against an agent whose many connections left the gateway none by which to kill its command."""
    ends = linked()
    many, other = ends[opener], ends[1 - opener]
    for _ in range(multiplex.CONNECTIONS):
        many.open()
    assert len(other.feed(many.take())) == multiplex.CONNECTIONS
    number = other.open()
    assert many.feed(other.take()) == [Opened(number)]
    for each in (many, other):
        each.reset(number)
    with pytest.raises(ConnectionResetError, match="1024 connections are open"):
        many.open()
    extra = multiplex._frame(multiplex.OPEN, 2 * multiplex.CONNECTIONS + 1 + opener)
    other.take()
    assert other.feed(extra) == []
    assert multiplex._frame(multiplex.RESET, 2 * multiplex.CONNECTIONS + 1 + opener) in other.take()
