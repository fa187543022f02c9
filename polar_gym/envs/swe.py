"""`gymnasium.make("polar/swe")`: the tasks of a config, in SWE-bench's form."""

from __future__ import annotations

from polar_gym.envs.setup import swe_setup
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv


class SweEnv(HarnessEnv):
    """A software-engineering task, worked on by an unmodified harness.

    The arguments are `render_mode`, and those of `polar_gym.envs.setup.swe_setup`.
    """

    set_up = staticmethod(swe_setup)


class SweVectorEnv(HarnessVectorEnv):
    """`num_envs` software-engineering tasks as sessions of one node.

    The arguments are those of `SweEnv`, and gymnasium's `num_envs` and `autoreset_mode`.
    """

    set_up = staticmethod(swe_setup)
