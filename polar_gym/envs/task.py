"""`gymnasium.make("polar/task", instruction=...)`: one task of your own, without a task file."""

from __future__ import annotations

from polar_gym.envs.setup import task_setup
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv


class TaskEnv(HarnessEnv):
    """One task, told in keyword arguments: `render_mode`, and those of `polar_gym.envs.setup.task_setup`."""

    set_up = staticmethod(task_setup)


class TaskVectorEnv(HarnessVectorEnv):
    """`num_envs` sessions of one task on one node: a group of samples in one step.

    The arguments are those of `TaskEnv`, and gymnasium's `num_envs` and `autoreset_mode`.
    """

    set_up = staticmethod(task_setup)
