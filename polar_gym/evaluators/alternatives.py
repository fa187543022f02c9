"""Draws other texts for a literal of a test: texts that nothing but the tested behaviour tells from the right one.

The texts lie symmetrically: the right one is neither their centre nor their end more often than the others.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from itertools import product

_KINDS = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.punctuation)
MOST = 16
"""How many texts a literal can have at most."""

Draw = Callable[[int, random.Random], list[str]]
"""(a power of two, source of randomness) -> so many texts, all different in meaning; the first one is the original."""


def choice(texts: list[str]) -> Draw:
    def draw(number: int, chance: random.Random) -> list[str]:
        return [texts[0], *chance.sample(texts[1:], number - 1)]

    return draw


def drawn(value: object, words: frozenset[str]) -> tuple[int, Draw, int] | None:
    """Return how many values like this one there are, a way to draw some, and the bits that they hide.

    None: the type has no such way. `words` are those of the test: other words would stand out. Texts hide nothing: code
    that knows the input, or the old answer where that is nearly right, tells the right text by its likeness.
    """
    if isinstance(value, bool) or value is None:
        return 2, choice([repr(value), {True: "False", False: "True", None: "False"}[value]]), 0
    if isinstance(value, int) and abs(value) < 1e15:
        return MOST, partial(_integers, value), 3 if value >= MOST * _roundness(value) else 1
    if isinstance(value, float) and repr(value).replace(".", "").isdigit():
        digits = len(repr(value)) - 1
        return MOST, partial(_floats, repr(value)), min(digits, 3)
    if isinstance(value, str | bytes) and (isinstance(value, str) or value.isascii()):
        text, made = (value, str) if isinstance(value, str) else (value.decode(), partial(bytes, encoding="ascii"))
        words = words if isinstance(value, str) else frozenset(filter(str.isascii, words))
        places = [match.span() for match in re.finditer(r"\w{2,}", text)]
        for number in (16, 8, 4):
            if _columns(number, len(places), len(words)):
                return number, partial(_other_words, text, words, made), 0
        one_digit = len(_places(text)) == 1 and text[_places(text)[0]] in string.digits
        return 8 if one_digit else MOST, partial(_characters, text, made), 0
    return None


def _columns(number: int, places: int, options: int) -> int:
    """Return at how many of the places other texts must stand so that `number` combinations exist; 0: that cannot be.

    Each of those places has the same number of texts, `options` at most.
    """
    doublings = number.bit_length() - 1
    able = [count for count in range(1, doublings + 1) if doublings % count == 0 and count <= places]
    return max((count for count in able if 2 ** (doublings // count) <= options), default=0)


def _integers(value: int, number: int, chance: random.Random) -> list[str]:
    """Return integers that are as round as `value`, which is at a random place among them; small ones begin at 0."""
    step = _roundness(value)
    first = 0 if 0 <= value < (number - 1) * step else value - step * chance.randrange(number)
    others = [each for each in range(first, first + number * step, step) if each != value]
    return [str(value), *(f"({each})" if each < 0 else str(each) for each in others)]


def _floats(value: str, number: int, chance: random.Random) -> list[str]:
    """Return floats that differ in some of their first digits. Of two, the other one is a nearest neighbour: a
    tolerance that lets no neighbour pass lets no farther float pass."""
    first, rest = value[:5], value[5:]
    if number > 2:
        return _characters(first, lambda text: float(text + rest), number, chance)
    last, zeros = len(first.rstrip(".")) - 1, re.sub(r"\d", "0", value)
    unit = Decimal(f"{zeros[:last]}1{zeros[last + 1 :]}")
    neighbours = [each for each in (Decimal(value) - unit, Decimal(value) + unit) if each >= 0]
    return [value, f"{chance.choice(neighbours):f}"]


def _roundness(value: int) -> int:
    """Return the largest power of ten that divides a number; 1 for 0."""
    return 10 * _roundness(value // 10) if value and value % 10 == 0 else 1


def _other_words(
    value: str, words: frozenset[str], made: Callable[[str], object], number: int, chance: random.Random
) -> list[str]:
    """Return texts with other words of the same test in some places, in all combinations."""
    spans = [match.span() for match in re.finditer(r"\w{2,}", value)]
    count = _columns(number, len(spans), len(words))
    chosen = sorted(chance.sample(spans, count))
    columns = []
    for start, end in chosen:
        others = sorted(words - {value[start:end]})
        columns.append([value[start:end], *chance.sample(others, 2 ** ((number.bit_length() - 1) // count) - 1)])
    texts = []
    for combination in product(*columns):
        parts, at = [], 0
        for (start, end), word in zip(chosen, combination, strict=True):
            parts += [value[at:start], word]
            at = end
        texts.append(repr(made("".join([*parts, value[at:]]))))
    return texts


def _characters(value: str, made: Callable[[str], object], number: int, chance: random.Random) -> list[str]:
    """Return texts that differ from each other in one to four letters or digits, in all combinations."""
    places = _places(value)
    if not places:
        return [repr(made(value + letter)) for letter in ("", *chance.sample(string.ascii_lowercase, number - 1))]
    count = _columns(number, len(places), number)
    chosen = chance.sample(places, count)
    texts = []
    for letters in product(
        *(_like(value[place], 2 ** ((number.bit_length() - 1) // count), chance) for place in chosen)
    ):
        characters = list(value)
        for place, letter in zip(chosen, letters, strict=True):
            characters[place] = letter
        texts.append(repr(made("".join(characters))))
    return texts


def _places(value: str) -> list[int]:
    """Return the places of the characters of a text that others can replace: letters and digits, else punctuation."""
    places = [place for place, character in enumerate(value) if _kind(character)]
    return [place for place in places if value[place] not in string.punctuation] or places


def _like(character: str, number: int, chance: random.Random) -> list[str]:
    """Return `number` characters of the same kind; the first one is the original."""
    return [character, *chance.sample(_kind(character), number - 1)]


def _kind(character: str) -> list[str]:
    """Return the other characters of a character's kind; [] where there are too few of them."""
    block = range(max(161, ord(character) - 32), ord(character) + 32) if character.isalpha() else ()
    kinds = (*_KINDS, "".join(each for each in map(chr, block) if each.isalpha()))
    others = [each for each in next((kind for kind in kinds if character in kind), "") if each != character]
    return others if len(others) >= MOST or character in string.digits else []
