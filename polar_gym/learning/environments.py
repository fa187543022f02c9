"""Vector environments of several harnesses, in which one model works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, Self

import gymnasium as gym

from polar_gym.config.run_config import RunConfig
from polar_gym.learning.grpo import roll_out
from polar_gym.schema import Episode

Assignment = tuple[str, str, int]
"""A session to play: (harness, task id, sample index)."""


class Environments:
    """A vector environment for each harness. Each has an engine of its own, and all engines have the same weights."""

    def __init__(
        self,
        configs: Mapping[str, RunConfig],
        *,
        places: int,
        seed: int,
        tasks: Mapping[str, Any],
        engine: Mapping[str, Any],
    ) -> None:
        """`configs`: harness -> its config, whose source of tasks is replaced by `tasks`. `engine`: more options of the
        engine. `seed` is that of sampling where the config names none."""
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}
        for harness, config in configs.items():
            unused = {"engine": True, "tasks": True, "rollout": {"num_samples", "output", "metrics"}}
            settings = config.model_dump(mode="json", exclude=unused)
            if settings["sampling"]["seed"] is None:
                settings["sampling"]["seed"] = seed
            own = {**config.engine.model_dump(mode="json"), "slots": places, **engine}
            made = gym.make_vec("polar/swe", num_envs=places, engine=own, tasks=dict(tasks), **settings)
            self._made[harness] = self._stack.enter_context(closing(made))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def play(self, sessions: Sequence[Assignment], action: dict[str, Any]) -> list[Episode]:
        """Return the episode of each session, those of one harness after the other."""
        episodes: list[Episode] = []
        for harness, envs in self._made.items():
            own = [session for session in sessions if session[0] == harness]
            episodes += roll_out(envs, [task_id for _, task_id, _ in own], action, [index for *_, index in own])
        return episodes

    def set_weights(self, state: Mapping[str, Any], version: str) -> None:
        for envs in self._made.values():
            envs.set_weights(state, version)
