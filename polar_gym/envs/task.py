"""`gymnasium.make("polar/task", instruction=...)`: one task of your own, without a task file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymnasium.vector import AutoresetMode

from polar_gym.envs.setup import task_setup
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv


class TaskEnv(HarnessEnv):
    """One task, told in keyword arguments."""

    def __init__(
        self,
        instruction: str,
        *,
        workspace: str | Path | Mapping[str, Any] | None = None,
        evaluator: str | Mapping[str, Any] = "session_completion",
        harness: str | Mapping[str, Any] | None = None,
        task_id: str = "task",
        recipe: str | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """`instruction` is what the harness is told; `workspace` the directory that it works on a copy of (None: an
        empty one), or the fields of `polar_gym.schema.Workspace`; `evaluator` what the result is worth, e.g.
        `{"name": "test_on_output", "command": "python3 -m unittest"}`. `settings` as in `SweEnv`.

        Raises `polar_gym.errors.ConfigError` before anything starts.
        """
        setup = task_setup(
            instruction,
            workspace=workspace,
            evaluator=evaluator,
            task_id=task_id,
            harness=harness,
            recipe=recipe,
            settings=settings,
        )
        super().__init__(setup, render_mode)


class TaskVectorEnv(HarnessVectorEnv):
    """`num_envs` sessions of it on one node: a group of samples in one step."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        instruction: str,
        workspace: str | Path | Mapping[str, Any] | None = None,
        evaluator: str | Mapping[str, Any] = "session_completion",
        harness: str | Mapping[str, Any] | None = None,
        task_id: str = "task",
        recipe: str | None = None,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **settings: Any,
    ) -> None:
        """See `TaskEnv`; `autoreset_mode` is gymnasium's."""
        setup = task_setup(
            instruction,
            workspace=workspace,
            evaluator=evaluator,
            task_id=task_id,
            harness=harness,
            recipe=recipe,
            settings=settings,
        )
        super().__init__(num_envs, setup, render_mode, autoreset_mode)
