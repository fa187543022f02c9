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
    rewards: Sequence[Mapping[str, float]], groups: Sequence[str], *, scale: Scale = "none"
) -> list[dict[str, float]]:
    """Return the advantage of each rewarded call, for each session; `rewards` has the calls in the order of arrival.

    The advantage is the sum of the rewards of the call and of the later calls of its session, each less the mean of all
    calls of the group: GRPO with process supervision (arXiv:2402.03300, section 4.1.3). The mean takes away the gain of
    a session that merely makes more calls.
    """
    result: list[dict[str, float]] = [{} for _ in rewards]
    for group in dict.fromkeys(groups):
        members = [place for place, own in enumerate(groups) if own == group]
        values = np.array([reward for place in members for reward in rewards[place].values()], dtype=np.float64)
        centred = iter(_over_mean(values, scale) if len(values) else values)
        for place in members:
            own = np.array([next(centred) for _ in rewards[place]])
            result[place] = dict(zip(rewards[place], own[::-1].cumsum()[::-1].tolist(), strict=True))
    return result


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
