"""The value of the state before a call, from the sessions that branched there, and the advantages of calls by it.

Monte Carlo, as VinePO (arXiv:2410.01679): the value is the mean reward of sessions that were sampled from the state. A
session is never a sample of its own states: its reward would be on both sides of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import PurePath
from statistics import mean, stdev

from polar_gym.schema import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValue:
    """The mean reward of the sessions that were sampled from a state of another session."""

    calls: int
    """How many delivered calls of the session come before the state; 0: its start."""
    before: frozenset[str]
    """The ids of those calls that are in the session's traces."""
    value: float
    standard_error: float
    """Of `value`: the standard deviation of the rewards (n - 1) over the root of `samples`; NaN with one sample."""
    samples: int


def state_values(episodes: Sequence[Episode]) -> dict[str, list[StateValue]]:
    """Return the states of each session that have a value, in their order, by session id.

    `episodes`: sessions, and those that branched from them. The first state of a session is the one that it was sampled
    from, where it has a value: by the others of its task, or by its siblings. Not samples: sessions without a reward,
    and branches that may have left the record (`when_divergent=live`) or have all of it (`calls=null`). Raises
    `ValueError` for a session that was branched from and whose episode does not name its delivered calls.
    """
    sampled: dict[str, list[Episode]] = {}
    branches: dict[str, dict[int, list[Episode]]] = {}
    for episode in episodes:
        start = episode.branch_point
        if episode.reward is None or (start and (start.when_divergent == "live" or start.calls is None)):
            continue
        sampled.setdefault(episode.group, []).append(episode)
        if start and start.calls:
            branches.setdefault(PurePath(start.record).name, {}).setdefault(start.calls, []).append(episode)
    return {episode.session.session_id: _states(episode, sampled, branches) for episode in episodes}


def _states(
    episode: Episode, sampled: Mapping[str, list[Episode]], branches: Mapping[str, dict[int, list[Episode]]]
) -> list[StateValue]:
    start, own = episode.branch_point, _calls(episode)
    first = (start.calls or 0) if start else 0
    found = dict(branches.get(_record(episode), {}))
    siblings = [other for other in sampled.get(episode.group, []) if other is not episode]
    found[first] = siblings + found.get(first, [])
    states: list[StateValue] = []
    delivered = episode.trajectory.delivered
    for calls, others in sorted(found.items()):
        if others and calls >= first:
            # A branch need not have asked for every call of its record.
            asked = episode.trajectory.branched if start is not None and calls == first else None
            held = calls if asked is None else min(calls, asked)
            if len(delivered) < held:
                raise ValueError(
                    f"session {episode.session.session_id}: others branched after {calls} calls, and its episode names "
                    f"{len(delivered)} delivered ones; play it again, if it is of an earlier version"
                )
            before = own & frozenset(delivered[:held])
            states.append(_value(calls, before, [other.reward for other in others if other.reward is not None]))
    return states


def turn_advantages(episode: Episode, values: Sequence[StateValue]) -> dict[str, float]:
    """Return the advantage of each call of a scored session: the value of the next state, less that of the last one.

    The reward is the value of the end. Calls with no valued state between them share one advantage; calls before the
    first valued state have none. With a value before each call, the sum of all is the reward less the first value.
    """
    assert episode.reward is not None
    left = _calls(episode) - values[0].before if values else frozenset[str]()
    result: dict[str, float] = {}
    for place, state in enumerate(values):
        last = place + 1 == len(values)
        after = episode.reward if last else values[place + 1].value
        turn = left if last else left & values[place + 1].before
        result |= dict.fromkeys(turn, after - state.value)
        left -= turn
    return result


def _value(calls: int, before: frozenset[str], rewards: Sequence[float]) -> StateValue:
    number, value = len(rewards), mean(rewards)  # of equal rewards exactly their value
    error = stdev(rewards) / number**0.5 if number > 1 else nan
    return StateValue(calls=calls, before=before, value=value, standard_error=error, samples=number)


def _calls(episode: Episode) -> frozenset[str]:
    return frozenset(call_id for trace in episode.trajectory.traces for call_id in trace.call_ids)


def _record(episode: Episode) -> str:
    """Return the name of the directory of the session's own record."""
    journal = episode.artifacts.journal
    return episode.session.session_id if journal is None else PurePath(journal).parent.name
