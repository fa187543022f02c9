"""Answers of models and bodies of clients, drawn at random, for laws that hold for all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from polar_gym.schema import Message
from tests.wire.stand_in import assistant

any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "name"]), inner),
    max_leaves=5,
)


def answers(
    texts: st.SearchStrategy[str] | st.SearchStrategy[str | None], calls: st.SearchStrategy[dict[str, Any]]
) -> st.SearchStrategy[Message]:
    """Of a model; `texts` are its content and its reasoning. Some are empty."""
    return st.builds(
        lambda content, thinking, made: assistant(content, thinking, *made), texts, texts, st.lists(calls, max_size=3)
    )


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To each value inside of `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of `body` with `value` at `path`."""
    body = copy.deepcopy(body)
    *way, last = path
    place: Any = body
    for key in way:
        place = place[key]
    place[last] = value
    return body
