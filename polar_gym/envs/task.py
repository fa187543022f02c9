"""`gymnasium.make("polar/task", instruction=...)`: one task of your own, without a task file."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from polar_gym.envs.setup import task_setup
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv


class TaskEnv(HarnessEnv):
    """One task, told in keyword arguments."""

    def __init__(self, instruction: str, *, render_mode: str | None = None, **task: Any) -> None:
        """`task`: the other arguments of `polar_gym.envs.setup.task_setup`, which raises `ConfigError`."""
        super().__init__(task_setup(instruction, **task), render_mode)


class TaskVectorEnv(HarnessVectorEnv):
    """`num_envs` sessions of one task on one node: a group of samples in one step."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        instruction: str,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **task: Any,
    ) -> None:
        """`task` as in `TaskEnv`; `autoreset_mode` is gymnasium's."""
        super().__init__(num_envs, task_setup(instruction, **task), render_mode, autoreset_mode)
