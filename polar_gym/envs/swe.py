"""`gymnasium.make("polar/swe")`: the tasks of a config, in SWE-bench's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from polar_gym.envs.setup import swe_setup
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv


class SweEnv(HarnessEnv):
    """A software-engineering task, worked on by an unmodified harness."""

    def __init__(
        self,
        harness: str | Mapping[str, Any] | None = None,
        *,
        recipe: str | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """`harness` is by default the recipe's, or without a recipe `pi`. `settings` are the groups and sections of
        `polar_gym.config.run_config.RunConfig`: `runtime="docker"`, `rollout={...}`, ...

        Raises `polar_gym.errors.ConfigError` before anything starts.
        """
        super().__init__(swe_setup(harness, recipe, settings), render_mode)


class SweVectorEnv(HarnessVectorEnv):
    """`num_envs` of them as sessions of one node."""

    def __init__(
        self,
        num_envs: int = 1,
        harness: str | Mapping[str, Any] | None = None,
        *,
        recipe: str | None = None,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **settings: Any,
    ) -> None:
        """See `SweEnv`; `autoreset_mode` is gymnasium's."""
        super().__init__(num_envs, swe_setup(harness, recipe, settings), render_mode, autoreset_mode)
