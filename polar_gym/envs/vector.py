"""N episodes at once: the sub-environments are N concurrent sessions of one node, in this process.

Sub-environment i with seed s behaves as a single environment with seed s + i. Observations are dictionaries of tuples,
actions are a sequence of N dictionaries, infos have gymnasium's vector form. All three autoreset modes are supported.
NEXT_STEP, gymnasium's own default, also serves a loop that calls `reset` before every step, at no cost.

A sandbox that does not come up ends no other session: `infos["failure"]` holds the reason, and the step returns a
masked episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from polar_gym.envs.single import (
    METADATA,
    Action,
    Observation,
    OnSessions,
    apply,
    branched,
    check_action,
    check_options,
    check_task_id,
    choose,
    observe,
    outcome,
    sample_index,
    show,
    told,
)
from polar_gym.envs.spaces import OBSERVED, action_space, observation_space
from polar_gym.errors import ConfigError
from polar_gym.gateway.session.life import SessionLife
from polar_gym.runtimes import RUNTIMES, is_confined
from polar_gym.schema import TaskRequest

Flags = NDArray[np.bool_]
Stepped = tuple[dict[str, tuple[str, ...]], NDArray[np.float64], Flags, Flags, dict[str, Any]]


class HarnessVectorEnv(OnSessions, VectorEnv[dict[str, tuple[str, ...]], Sequence[Action], np.ndarray]):
    """An environment in which N unmodified harnesses work. `HarnessEnv` describes the spaces of a sub-environment."""

    def __init__(
        self,
        num_envs: int = 1,
        *arguments: Any,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **settings: Any,
    ) -> None:
        """`arguments` and `settings` are those of `set_up`; `autoreset_mode` is gymnasium's. Raises `ConfigError`."""
        super().__init__(self.set_up(*arguments, **settings), render_mode)
        if not isinstance(num_envs, int) or num_envs < 1:
            raise ConfigError(f"num_envs={num_envs!r}: expected an int, at least 1")
        if num_envs > 1 and not is_confined(RUNTIMES.get(self.config.runtime.name)):
            raise ConfigError(
                f"num_envs={num_envs}: runtime={self.config.runtime.name} has one session at a time; set num_envs=1"
            )
        self.num_envs = num_envs
        self.autoreset_mode = _mode(autoreset_mode)
        self.metadata = {**METADATA, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space, self.single_action_space = observation_space(), action_space()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._chances = [seeding.np_random()[0] for _ in range(num_envs)]
        self._observations: list[Observation] = [dict.fromkeys(OBSERVED, "")] * num_envs
        self._done = np.zeros(num_envs, dtype=np.bool_)
        self._shown: list[SessionLife | None] = [None] * num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
        """Prepare the sandboxes. `seed`: s for sub-environment 0, s + 1 for 1, ...; or one for each.

        Options: `task_id`, one for all or a sequence with one for each (None: drawn at random); `branch`, as that of
        `HarnessEnv.reset`, one for all or a sequence with one for each (None: no branch); `sample_index`, a sequence
        with one of `HarnessEnv.reset` for each (None: the default); `reset_mask`, a bool array: only these are reset.
        Raises `KeyError`, `TypeError` or `ValueError` for a wrong one.
        """
        options = options or {}
        check_options(options, "task_id", "branch", "sample_index", "reset_mask")
        places = self._masked(options.get("reset_mask"))
        task_ids = self._task_ids(options.get("task_id"))
        samples = self._samples(options.get("sample_index"))
        seeds = self._seeds(seed)
        super().reset(seed=seed if isinstance(seed, int) else None)
        for place in places:
            if seeds[place] is not None:
                self._chances[place] = seeding.np_random(seeds[place])[0]
        branch = options.get("branch")
        branches = [branch] * self.num_envs if branch is None or isinstance(branch, tuple) else branch
        if not _one_each(branches, self.num_envs):
            raise ValueError(f"options['branch'] must be one (episode, calls) or {self.num_envs}, got {len(branches)}")
        given = {place: branched(branches[place], task_ids[place]) for place in places if branches[place] is not None}
        infos = self._prepare({place: task_ids[place] for place in places}, {}, given, samples)
        return self._batched(), infos

    def step(self, actions: Sequence[Action | None]) -> Stepped:
        """Run every harness to its end, all at once. A sub-environment that autoreset makes due is reset instead. One
        whose action is None is left alone.

        The reward of a failed session is 0.0, with its place in `infos["failure"]` set: mask it. With SAME_STEP this is
        `infos["final_info"]["failure"]`, and `infos["failure"]` tells of the sessions that begin.
        """
        acting = self._acting(actions)
        due = [place for place in acting if self._done[place] and self.autoreset_mode is AutoresetMode.NEXT_STEP]
        places = [place for place in acting if place not in due]
        self._apply({place: acting[place] for place in places})
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations, truncations = (np.zeros(self.num_envs, dtype=np.bool_) for _ in range(2))
        infos: dict[str, Any] = {}
        for place, episode in self._sessions.play(places).items():
            life = self._shown[place]
            assert life is not None
            self._observations[place] = observe(life, episode)
            rewards[place], terminations[place], truncations[place], info = outcome(episode)
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                info = {"final_obs": self._observations[place], "final_info": info}
            infos = self._add_info(infos, info, place)
        self._done[places] = True
        again = places if self.autoreset_mode is AutoresetMode.SAME_STEP else due
        infos = self._prepare(dict.fromkeys(again), infos)
        return self._batched(), rewards, terminations, truncations, infos

    def render(self) -> tuple[str, ...] | None:
        """Return each sub-environment's transcript so far. Another thread may call this while `step` runs."""
        return tuple(map(show, self._shown)) if self._renders() else None

    def _prepare(
        self,
        task_ids: Mapping[int, str | None],
        infos: dict[str, Any],
        given: Mapping[int, TaskRequest] | None = None,
        samples: Mapping[int, int | None] | None = None,
    ) -> dict[str, Any]:
        requests = {
            place: (given or {}).get(place) or choose(self._requests, task_id, self._chances[place])
            for place, task_id in task_ids.items()
        }
        for place, life in self._sessions.prepare(requests, samples).items():
            self._shown[place] = life
            self._observations[place] = observe(life)
            self._done[place] = False
            infos = self._add_info(infos, told(life.session), place)
        return infos

    def _acting(self, actions: Sequence[Action | None]) -> dict[int, Action]:
        """Return the actions by place, without the places that have none. Raises `ValueError` for a wrong number."""
        if not _one_each(actions, self.num_envs):
            raise ValueError(
                f"actions must be a sequence of {self.num_envs} dictionaries, e.g. [{{}}] * {self.num_envs}, "
                f"got {actions!r}"
            )
        return {place: action for place, action in enumerate(actions) if action is not None}

    def _apply(self, actions: Mapping[int, Action]) -> None:
        """Apply the actions to the sessions of their places. Raises before any session has begun to run."""
        for place, action in actions.items():
            check_action(action, self.single_action_space, f" of sub-environment {place}")
        lives = {place: self._sessions.open(place) for place in actions}
        if missing := [place for place, life in lives.items() if life is None]:
            raise gym.error.ResetNeeded(f"call reset() before step(): sub-environments {missing} have no episode")
        for place, life in lives.items():
            if life is not None:
                apply(actions[place], life)

    def _batched(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(seen[name] for seen in self._observations) for name in self._observations[0]}

    def _masked(self, mask: Any) -> list[int]:
        if mask is None:
            return list(range(self.num_envs))
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {mask!r}")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must have shape ({self.num_envs},) and at least one True, got {mask!r}"
            )
        return np.flatnonzero(mask).tolist()

    def _task_ids(self, given: Any) -> Sequence[str | None]:
        task_ids = [given] * self.num_envs if given is None or isinstance(given, str) else given
        if not _one_each(task_ids, self.num_envs):
            raise ValueError(f"options['task_id'] must name 1 or {self.num_envs} tasks, got {given!r}")
        for task_id in task_ids:
            check_task_id(task_id, self._requests)
        return task_ids

    def _samples(self, given: Any) -> dict[int, int | None]:
        samples = [None] * self.num_envs if given is None else given
        if not _one_each(samples, self.num_envs):
            raise ValueError(f"options['sample_index'] must have {self.num_envs} numbers, got {given!r}")
        return dict(enumerate(map(sample_index, samples)))

    def _seeds(self, given: Any) -> Sequence[int | None]:
        if given is None:
            return [None] * self.num_envs
        seeds = [given + place for place in range(self.num_envs)] if isinstance(given, int) else given
        if not _one_each(seeds, self.num_envs):
            raise ValueError(f"seed must be one int or {self.num_envs}, got {given!r}")
        return seeds


def _one_each(given: Any, count: int) -> bool:
    return isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str) and len(given) == count


def _mode(given: str | AutoresetMode) -> AutoresetMode:
    try:
        return AutoresetMode(given)
    except ValueError as error:
        known = ", ".join(repr(mode.value) for mode in AutoresetMode)
        raise ConfigError(f"autoreset_mode={given!r}: unknown; known: {known}") from error
