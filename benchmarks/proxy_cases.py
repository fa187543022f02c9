"""The cases of the proxy's benchmark, and its part of the report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import proxy
from benchmarks.load import Measured
from benchmarks.proxy import CONNECTIONS, HEADLINE, SIZES, Engine, Gateway, Pace, Subject, engine, floor, gateway
from benchmarks.report import Figure, Goal, Plot, Section, Table
from benchmarks.wires import CHAT, WIRES

COLUMNS = ("case", "c", "p50 ms", "added ms", "x direct", "p99 ms", "req/s", "x direct", "CPU ms per call", "x direct")
DIRECT = {1: 6.0, 32: 4.0}
"""The goal by connections: at most so many times the CPU of a direct call."""
FLOORS = ("floor", "floor, asking", "floor, recording")
TURNS = 50
OPENING = 1024
"""Prompt tokens at the beginning of the long session."""


@dataclass
class Figures:
    """The rows of one table, and the figures for the claims."""

    pace: Pace
    rows: list[tuple[Figure, ...]] = field(default_factory=list)
    measured: dict[tuple[str, int], tuple[Measured, Measured]] = field(default_factory=dict)
    """(name of the subject, connections) -> its figures, and the figures of the direct calls in the same rounds."""

    def compare(self, direct: Subject, *subjects: Subject, connections: int) -> None:
        base, *others = self.pace.compare([direct, *subjects], connections)
        if (direct.name, connections) not in self.measured:
            self.measured[direct.name, connections] = base, base
            self.rows.append(_row(direct.name, connections, base, base))
        for subject, found in zip(subjects, others, strict=True):
            self.measured[subject.name, connections] = found, base
            self.rows.append(_row(subject.name, connections, found, base))

    def table(self, caption: str) -> Table:
        return Table(columns=COLUMNS, rows=self.rows, caption=caption)


def _row(name: str, connections: int, found: Measured, base: Measured) -> tuple[Figure, ...]:
    return (
        name,
        connections,
        found.p50_ms,
        found.p50_ms - base.p50_ms,
        found.p50_ms / base.p50_ms,
        found.p99_ms,
        found.per_second,
        found.per_second / base.per_second,
        found.cpu_ms,
        found.cpu_ms / base.cpu_ms,
    )


def measure(quick: bool) -> Section:
    pace = Pace(1, 0.5) if quick else Pace(5, 1.0)
    connections = CONNECTIONS[:2] if quick else CONNECTIONS
    section = Section(title="Proxy", text=(proxy.__doc__ or "").partition("\n\n")[2].strip())
    with engine() as mock:
        with gateway(mock.url) as default:
            _headline(section, pace, mock, default, connections)
            _sizes(section, pace, mock, default)
            _wires(section, pace, mock, default)
            _long_session(section, pace, default)
        _settings(section, pace, mock)
    return section


def _headline(section: Section, pace: Pace, mock: Engine, default: Gateway, connections: tuple[int, ...]) -> None:
    figures = Figures(pace)
    direct, first = mock.direct(HEADLINE), default.first(CHAT, HEADLINE)
    spliced = default.following(CHAT, HEADLINE, sessions=max(connections))
    with ExitStack() as stack:
        floors = [stack.enter_context(floor(mock, HEADLINE, name)) for name in FLOORS]
        for count in connections:
            figures.compare(direct, first, spliced, *floors, connections=count)
    section.tables.append(
        figures.table(
            "Chat Completions, a prompt of 8k tokens, whole answers, journal on; c: connections. *floor*: an aiohttp "
            "handler that parses request and answer, and writes the answer to a file (`benchmarks/floor.py`). *floor, "
            "asking*: it asks the engine twice, as a spliced call does, and reads the answers as bytes. *floor, "
            "recording*: it parses them, too, and writes the tokens."
        )
    )
    for count, most in DIRECT.items():
        found, base = figures.measured["spliced", count]
        least_found, _ = figures.measured["floor", count]
        section.goals += [
            Goal(
                claim=f"proxy: at most {most:g} x the CPU of a direct call (8k tokens, spliced, journaled, c={count})",
                measured=f"{found.cpu_ms / base.cpu_ms:.1f}",
                held=found.cpu_ms <= most * base.cpu_ms,
            ),
            Goal(
                claim=f"proxy: at most 2 x the CPU of the floor (c={count})",
                measured=f"{found.cpu_ms / least_found.cpu_ms:.1f}",
                held=found.cpu_ms <= 2 * least_found.cpu_ms,
            ),
        ]


def _sizes(section: Section, pace: Pace, mock: Engine, default: Gateway) -> None:
    figures, curves = Figures(pace), {}
    for tokens in SIZES:
        name = f"{tokens // 1024}k"
        subjects = [
            default.first(CHAT, tokens, name=f"{name} first"),
            default.following(CHAT, tokens, sessions=32, name=f"{name} spliced"),
        ]
        direct = mock.direct(tokens)
        for count in (1, 32):
            figures.compare(
                Subject(f"{name} direct", direct.port, direct.pids, direct.request), *subjects, connections=count
            )
    for which in ("direct", "first", "spliced"):
        found = [(tokens, figures.measured[f"{tokens // 1024}k {which}", 32][0].cpu_ms) for tokens in SIZES]
        curves[which] = found
    section.tables.append(figures.table("Prompts of other sizes."))
    section.plots.append(
        Plot(name="prompts", title="CPU by prompt", x="prompt tokens", y="ms per call", curves=curves, logarithmic=True)
    )


def _wires(section: Section, pace: Pace, mock: Engine, default: Gateway) -> None:
    figures = Figures(pace)
    for stream in (False, True):
        how = "streamed" if stream else "whole"
        subjects = [
            default.following(wire, HEADLINE, stream=stream, sessions=32, name=f"{wire.name}, {how}") for wire in WIRES
        ]
        for count in (1, 32):
            figures.compare(mock.direct(HEADLINE), *subjects, connections=count)
    section.tables.append(
        figures.table(
            "Each wire format, 8k tokens, spliced. *Streamed* is the default way: the answer, complete, leaves as the "
            "provider's events (x direct is against whole answers)."
        )
    )


def _long_session(section: Section, pace: Pace, default: Gateway) -> None:
    last = default.following(CHAT, OPENING, turns=TURNS - 1, sessions=8, name=f"turn {TURNS}")
    tokens = default.prompt_tokens(last)
    same = default.afresh(CHAT, last, sessions=8, name="the same request, first of a session")
    few = default.first(CHAT, tokens, name="a first request of few, long messages")
    rows: list[tuple[Figure, ...]] = []
    ratios = {}
    for count in (1, 8):
        base, *others = pace.compare([same, last, few], count)
        ratios[count] = others[0].cpu_ms / base.cpu_ms
        for subject, found in zip((same, last, few), (base, *others), strict=True):
            size = default.prompt_tokens(subject)
            rows.append((subject.name, size, count, found.p50_ms, found.cpu_ms, found.cpu_ms / base.cpu_ms))
    section.tables.append(
        Table(
            columns=("call", "prompt tokens", "c", "p50 ms", "CPU ms per call", "x first"),
            rows=rows,
            caption=f"Turn {TURNS} of a session, spliced, beside the same request as the first of a new session, "
            "where the engine templates it: the cost of a session's age.",
        )
    )
    section.goals.append(
        Goal(
            claim=f"proxy: turn {TURNS} within 1.2 x a first turn of equal prompt size (CPU)",
            measured=", ".join(f"{ratio:.2f} at c={count}" for count, ratio in ratios.items()),
            held=max(ratios.values()) <= 1.2,
        )
    )


def _settings(section: Section, pace: Pace, mock: Engine) -> None:
    figures = Figures(pace)
    direct, streamed = mock.direct(HEADLINE), mock.direct(HEADLINE, stream=True)
    real = Subject("direct, streamed", streamed.port, streamed.pids, streamed.request)
    with gateway(mock.url, sessions=32) as default:
        spliced = default.following(CHAT, HEADLINE, sessions=32)
        with gateway(mock.url, "--no-splice", sessions=32) as off:
            plain = off.following(CHAT, HEADLINE, sessions=32, name="not spliced")
            for count in (1, 32):
                figures.compare(direct, spliced, plain, connections=count)
        with gateway(mock.url, "--streaming", "real", sessions=32) as streaming:
            events = streaming.following(CHAT, HEADLINE, stream=True, sessions=32, name="real streaming")
            for count in (1, 32):
                figures.compare(real, events, connections=count)
        found, base = figures.measured["real streaming", 1]
        section.goals.append(
            Goal(
                claim="proxy: real streaming at most 12 x the CPU of a direct streamed call (c=1)",
                measured=f"{found.cpu_ms / base.cpu_ms:.1f}",
                held=found.cpu_ms <= 12 * base.cpu_ms,
            )
        )
    section.tables.append(
        figures.table(
            "Settings, 8k tokens: splicing off; the engine's own stream, 340 tokens in events of 8, passed on as it "
            "comes (direct: one event for each token)."
        )
    )
