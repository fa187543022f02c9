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
        self, harness: str | Mapping[str, Any] | None = None, *, render_mode: str | None = None, **config: Any
    ) -> None:
        """`harness` and `config`: the arguments of `polar_gym.envs.setup.swe_setup`, which raises `ConfigError`."""
        super().__init__(swe_setup(harness, **config), render_mode)


class SweVectorEnv(HarnessVectorEnv):
    """`num_envs` software-engineering tasks as sessions of one node."""

    def __init__(
        self,
        num_envs: int = 1,
        harness: str | Mapping[str, Any] | None = None,
        *,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **config: Any,
    ) -> None:
        """`harness` and `config` as in `SweEnv`; `autoreset_mode` is gymnasium's."""
        super().__init__(num_envs, swe_setup(harness, **config), render_mode, autoreset_mode)
