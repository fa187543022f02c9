"""The advantage of a session over its group, the other samples of its task, and of a call by rewards of its own.

An advantage belongs to a session, not to a trace: a session that forked into five traces counts once in the mean of its
group. A session without a reward (the machinery failed, not the policy) is in no mean, and has no advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scale = Literal["none", "std"]
"""The divisor of the difference from the group's mean. `none`: no divisor; hard and easy tasks then weigh by how much
their rewards differ. `std`: the group's standard deviation (n - 1), as in GRPO's first form."""

EPSILON = 1e-6


def advantages(rewards: Sequence[float | None], groups: Sequence[str], *, scale: Scale = "none") -> NDArray[np.float64]:
    """Return one advantage for each session; NaN where the reward is None.

    Unscaled advantages sum to zero in every group. Where all rewards of a group are equal, each is exactly zero.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    result = np.full(len(values), np.nan)
    _, numbers = np.unique(np.array(groups), return_inverse=True)
    for number in set(numbers.tolist()):
        scored = (numbers == number) & ~np.isnan(values)
        if scored.any():
            result[scored] = _over_mean(values[scored], scale)
    return result


def call_advantages(
    rewards: Sequence[Mapping[str, float | None]], groups: Sequence[str], *, scale: Scale = "none"
) -> list[dict[str, float]]:
    """Return the advantage of each call up to the last rewarded one, for each session. `rewards` has the calls in the
    order of arrival, with None for a call without a reward.

    The advantage is the sum of the rewards of the call and of the later calls of its session, each less the mean of all
    calls of the group: GRPO with process supervision (arXiv:2402.03300, section 4.1.3). The mean takes away the gain of
    a session that merely makes more calls.
    """
    result: list[dict[str, float]] = [{} for _ in rewards]
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    for members in places.values():
        given = [reward for place in members for reward in rewards[place].values() if reward is not None]
        values = np.array(given, dtype=np.float64)
        centred = iter(_over_mean(values, scale) if given else values)
        for place in members:
            own = [None if reward is None else next(centred) for reward in rewards[place].values()]
            result[place] = _to_come(dict(zip(rewards[place], own, strict=True)))
    return result


def _to_come(rewards: Mapping[str, float | None]) -> dict[str, float]:
    """Return the sum of the reward of each call and of the later ones, for the calls up to the last rewarded one."""
    sums, total, begun = {}, 0.0, False
    for call_id, reward in reversed(list(rewards.items())):
        total, begun = total + (reward or 0.0), begun or reward is not None
        if begun:
            sums[call_id] = total
    return dict(reversed(list(sums.items())))


def without_variance(rewards: Sequence[float | None], groups: Sequence[str]) -> set[str]:
    """Return the groups whose scored sessions all have the same reward: these groups teach nothing."""
    seen: dict[str, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            seen.setdefault(group, set()).add(reward)
    return {group for group, values in seen.items() if len(values) == 1}


def _over_mean(values: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    if values.max() == values.min():
        return np.zeros(len(values))  # exactly zero: the mean of equal numbers may differ from them in the last bit
    centred = values - values.mean()
    return centred if scale == "none" else centred / (values.std(ddof=1) + EPSILON)
