"""Find the calls at which a recorded session is branched, and make the requests of the branches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from polar_gym.errors import ConfigError
from polar_gym.schema import Episode, ModelCall, StartFrom, TaskRequest

_EDITS = re.compile(r"edit|write|patch|apply|replace|sed -i|[^->2]>", re.IGNORECASE)
"""In the name or the arguments of a tool call: the call changes files."""


def branching_points(calls: Sequence[ModelCall], at: str) -> list[int]:
    """Return how many delivered calls each branch has from the record, in rising order.

    `at`: `call=N`: the first N calls. `each-turn`: all numbers of calls but none and all. `before-last-edit`: the calls
    before the last one that changes a file. Raises `ConfigError` for another text, and where there is no such place.
    """
    delivered = [call for call in sorted(calls, key=lambda call: call.index) if call.outcome == "delivered"]
    if at == "each-turn":
        return list(range(1, len(delivered)))
    if at == "before-last-edit":
        edits = [place for place, call in enumerate(delivered) if _EDITS.search(str(_tools(call)))]
        if not edits:
            raise ConfigError(f"--at={at!r}: no call of the session changes a file; use call=N or each-turn")
        return edits[-1:]
    found = re.fullmatch(r"call=([0-9]{1,9})", at)
    if found is None:
        raise ConfigError(f"--at={at!r}: unknown; known: call=N, each-turn, before-last-edit")
    if int(found[1]) > len(delivered):
        raise ConfigError(f"--at={at!r}: the session has {len(delivered)} delivered calls")
    return [int(found[1])]


def _tools(call: ModelCall) -> list[tuple[str, str]]:
    made = (call.response or {}).get("tool_calls") or []
    return [(each["function"]["name"], each["function"]["arguments"]) for each in made]


def branch_of(episode: Episode, calls: int) -> TaskRequest:
    """Return the request of a branch of an episode after its first `calls` delivered calls. Raises `ConfigError` where
    the episode names no journal."""
    if episode.artifacts.journal is None:
        raise ConfigError(f"session {episode.session.session_id}: the episode names no journal; it cannot be branched")
    start = StartFrom(record=str(Path(episode.artifacts.journal).parent.absolute()), calls=calls)
    return episode.request.model_copy(update={"start_from": start})
