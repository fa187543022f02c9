"""Draws plans by chance, and changes plans that led somewhere."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from tests.attack_search.fragment import Fragment
from tests.attack_search.grounds import Ground
from tests.attack_search.plan import FRAMEWORKS, PLACES, TRIGGERS, Piece, Plan

_MOST_PIECES = 3
_IN_THE_PACKAGE = PLACES[:5]


class Drawer:
    """Draws plans. Every fragment leads as often as every other, in an order by chance."""

    def __init__(self, seed: object, grounds: Mapping[str, Ground], fragments: Mapping[str, Fragment]) -> None:
        self._random = random.Random(str(seed))
        self._grounds = grounds
        self._fragments = fragments
        self._leads: list[tuple[str, str]] = []
        """(ground, fragment) pairs of this round that have not led yet."""

    def draw(self) -> Plan:
        """Return a new plan: the next leading fragment, and up to two others by chance."""
        if not self._leads:
            self._leads = [
                (ground.name, name) for ground in self._grounds.values() for name in self._fitting(ground.language)
            ]
            self._random.shuffle(self._leads)
        ground, lead = self._leads.pop()
        others = self._random.choices((0, 1, 2), (5, 3, 2))[0]
        names = [lead, *self._random.sample(self._fitting(self._grounds[ground].language), others)]
        self._random.shuffle(names)
        pieces = tuple(self._piece(name) for name in dict.fromkeys(names))
        return Plan(ground=ground, pieces=pieces, partial=self._random.random() < 0.3)

    def change(self, plan: Plan) -> Plan:
        """Return the plan with one thing about it changed."""
        pieces = list(plan.pieces)
        nth = self._random.randrange(len(pieces))
        match self._random.choice(("piece", "place", "trigger", "order", "more", "less", "partial")):
            case "piece":
                pieces[nth] = self._piece(pieces[nth].fragment)
            case "place":
                pieces[nth] = dataclasses.replace(pieces[nth], place=self._place(), nth=self._random.randrange(9))
            case "trigger":
                pieces[nth] = dataclasses.replace(pieces[nth], trigger=self._random.choice(TRIGGERS))
            case "order":
                self._random.shuffle(pieces)
            case "more" if len(pieces) < _MOST_PIECES:
                language = self._grounds[plan.ground].language
                pieces.insert(nth, self._piece(self._random.choice(self._fitting(language))))
            case "less" if len(pieces) > 1:
                pieces.pop(nth)
            case _:
                return dataclasses.replace(plan, partial=not plan.partial)
        return dataclasses.replace(plan, pieces=tuple(pieces))

    def either(self, plans: Sequence[Plan]) -> Plan:
        """Return a new plan, or one of these with a change."""
        if plans and self._random.random() < 0.3:
            return self.change(self._random.choice(plans))
        return self.draw()

    def _fitting(self, language: str) -> list[str]:
        return [name for name, fragment in self._fragments.items() if fragment.language in (language, "any")]

    def _place(self) -> str:
        return self._random.choice(_IN_THE_PACKAGE if self._random.random() < 0.75 else PLACES)

    def _piece(self, name: str) -> Piece:
        """Return the fragment in a place by chance; every other one runs at once and unguarded."""
        if self._random.random() < 0.3:
            return Piece(fragment=name, place=self._random.choice(_IN_THE_PACKAGE[:2]))
        return Piece(
            fragment=name,
            place=self._place(),
            nth=self._random.randrange(9),
            trigger=self._random.choice(("now", *TRIGGERS)),
            framework=self._random.choices(FRAMEWORKS, (8, 1, 1))[0],
            guarded=self._random.random() < 0.3,
            packed=self._random.random() < 0.2,
        )
