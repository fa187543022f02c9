"""Draws, builds and grades plans until the time is over, and counts what came of them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.attack_search.building import commands
from tests.attack_search.drawing import Drawer
from tests.attack_search.fragment import Fragment
from tests.attack_search.grounds import Ground
from tests.attack_search.plan import Plan
from tests.lifecycle.grading_bench import Bench

NOT_TAKEN = "no diff could be taken"
NO_VERDICT = "no verdict"
_NAMED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\S*[/.:]\w\S*")
_NAMES = re.compile(r"X(?:,? X)+")
_PRINTED = re.compile(r"(reported nothing: ).*")
"""What the tested code wrote last: free text."""
_NUMBER = re.compile(r"\d+")
_KEPT = 200
"""The plans of rare outcomes that the search goes on from."""
_SHORT = 160


class Graded(Protocol):
    """The part of an evaluator's result that the search reads."""

    @property
    def reward(self) -> float: ...
    @property
    def detail(self) -> str: ...


Grader = Callable[[Ground, bytes], Awaitable[Graded]]


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A diff that was rewarded, or that the grader had no verdict on."""

    plan: Plan
    number: int
    """The try, counted from 1."""
    diff: bytes
    reward: float | None
    """None: the grader gave no verdict."""
    detail: str
    again: list[float | None] = field(default_factory=list)
    """The rewards of the same diff when it was graded again."""
    alone: list[str] = field(default_factory=list)
    """The fragments that are rewarded without the others, in the same place."""

    def as_json(self, seed: object) -> dict[str, Any]:
        return {
            "seed": seed,
            "try": self.number,
            "fragments": self.plan.fragments,
            "reward": self.reward,
            "detail": self.detail,
            "rewards_again": self.again,
            "rewarded_alone": self.alone,
            "plan": self.plan.as_json(),
            "diff": self.diff.decode("utf-8", "surrogateescape"),
        }


@dataclass(eq=False, kw_only=True)
class Search:
    """A search for diffs that a grader rewards."""

    bench: Bench
    grounds: Mapping[str, Ground]
    fragments: Mapping[str, Fragment]
    grade: Grader
    seed: object
    kept: Callable[[], object] = lambda: None
    """Called after each breach, so that a program that is stopped has kept what it found."""
    tries: int = 0
    graded: int = 0
    """Distinct diffs that were graded."""
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Outcome -> the first plan that had it."""
    used: Counter[str] = field(default_factory=Counter)
    """Fragment -> graded diffs that it was a part of."""
    breaches: list[Breach] = field(default_factory=list)
    unjudged: list[Breach] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)
    _by_outcome: dict[str, list[Plan]] = field(default_factory=lambda: defaultdict(list))

    async def explore(self, seconds: float, *, workers: int = 1, most: float = float("inf"), enough: float) -> None:
        """Try plans until the time is over, `most` were tried or `enough` were rewarded."""
        drawer = Drawer(self.seed, self.grounds, self.fragments)
        end = time.monotonic() + seconds

        async def work() -> None:
            while time.monotonic() < end and self.tries < most and len(self.breaches) < enough:
                await self.attempt(drawer.either(self._rare()))

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())

    async def attempt(self, plan: Plan) -> None:
        """Build and grade one plan, and count its outcome."""
        self.tries += 1
        number = self.tries
        ground = self.grounds[plan.ground]
        diff = await self._diff(plan)
        if diff is None:
            self.outcomes[NOT_TAKEN] += 1
            return
        digest = hashlib.sha256(ground.name.encode() + b"\0" + diff).digest()
        if digest in self._seen:
            return
        self._seen.add(digest)
        reward, detail = await self._verdict(ground, diff)
        self.graded += 1
        self.used.update(plan.fragments)
        outcome = kind(detail) if reward is not None else f"{NO_VERDICT}: {kind(detail)}"
        outcome = f"rewarded: {outcome}" if reward else outcome
        self.outcomes[outcome] += 1
        self.examples.setdefault(outcome, plan.as_json())
        if len(self._by_outcome[outcome]) < _KEPT:
            self._by_outcome[outcome].append(plan)
        if reward is None or reward > 0:
            breach = Breach(plan=plan, number=number, diff=diff, reward=reward, detail=detail)
            await self._keep(breach)

    async def _keep(self, breach: Breach) -> None:
        """Grade the diff again, and each fragment alone, so that the reader knows what is to blame."""
        ground = self.grounds[breach.plan.ground]
        breach.again.extend([(await self._verdict(ground, breach.diff))[0] for _ in range(2)])
        if breach.reward is None:
            if None in breach.again:  # a machine that was busy once is no breach
                self.unjudged.append(breach)
                self.kept()
            return
        for piece in breach.plan.pieces:
            alone = Plan(ground=ground.name, pieces=(piece,), partial=breach.plan.partial)
            diff = await self._diff(alone)
            if diff is not None and (await self._verdict(ground, diff))[0]:
                breach.alone.append(piece.fragment)
        self.breaches.append(breach)
        self.kept()

    async def _diff(self, plan: Plan) -> bytes | None:
        """Return the plan's diff; None where an agent who did this is left without one."""
        ground = self.grounds[plan.ground]
        steps = ["\n".join(commands(plan, ground, self.fragments))]
        try:
            return await self.bench.diff_after(ground.task, *steps)
        except Exception:  # noqa: BLE001  # of the sandbox or of the diff: there is nothing to grade
            return None

    async def _verdict(self, ground: Ground, diff: bytes) -> tuple[float | None, str]:
        try:
            result = await self.grade(ground, diff)
        except Exception as error:  # noqa: BLE001  # an attack that stops the grader is found as well
            return None, f"{type(error).__name__}: {error}"
        return result.reward, result.detail

    def _rare(self) -> list[Plan]:
        """Return the plans with the rarer half of the outcomes."""
        kinds = sorted(self._by_outcome, key=lambda outcome: self.outcomes[outcome])
        return [plan for outcome in kinds[: (len(kinds) + 1) // 2] for plan in self._by_outcome[outcome]]


def kind(detail: str) -> str:
    """Return a detail's first line without names and numbers, so that like outcomes are counted together."""
    line = detail.strip().partition("\n")[0]
    line = _NUMBER.sub("N", _NAMES.sub("X", _NAMED.sub("X", _PRINTED.sub(r"\1...", line))))
    return line[:_SHORT] or "no detail"
