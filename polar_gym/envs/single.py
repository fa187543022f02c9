"""One episode is one harness run on one task, and has exactly one step.

`reset` prepares the sandbox. `step` runs the harness in the sandbox to its end and returns the reward; the trajectory
is in `info["trajectory"]`, an `Episode`. The seed of `reset` chooses the task. Only `sampling.seed` of the config seeds
the policy's samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from polar_gym.envs.sessions import Sessions
from polar_gym.envs.setup import Setup
from polar_gym.envs.spaces import action_space, observation_space
from polar_gym.envs.transcript import transcript
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import make_node
from polar_gym.gateway.session.branching import branch_of
from polar_gym.gateway.session.life import SessionLife
from polar_gym.schema import Episode, Sampling, Session, TaskRequest

Observation = dict[str, str]
Action = Mapping[str, Any]

METADATA: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}
"""The metadata of the environments. A transcript has no frames, but gymnasium requires a frame rate."""


class OnSessions:
    """The part of an environment that holds its config, its tasks, and its sessions on a node."""

    set_up: Callable[..., Setup]
    """Makes config, tasks and requests of the environment's arguments. Raises `ConfigError`."""

    def __init__(self, setup: Setup, render_mode: str | None) -> None:
        """Make the node, which starts with the first session. Raises `ConfigError` for an unknown render mode, and as
        `Node.check_unseen`."""
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode={render_mode!r}: unknown; known: None, 'ansi'")
        self.render_mode = render_mode
        self.config = setup.config
        self.tasks = setup.tasks
        self._requests = setup.requests
        node = make_node(setup.config, setup.tasks)
        node.check_unseen(request.runtime for request in setup.requests.values())
        self._sessions = Sessions(node)
        self._finalizer = weakref.finalize(self, self._sessions.let_go)
        self._finalizer.atexit = False  # `sessions` closes at exit, while threads can still be used

    def set_weights(self, weights: str | Path | Mapping[str, Any], version: str) -> None:
        """Give the engine new weights, a directory or tensors by name, under the name that marks their tokens.

        Another thread may call this while `step` runs: calls under way go on under the new weights. Raises
        `polar_gym.engines.EngineError` where the engine takes none, or none like these.
        """
        self._sessions.set_weights(weights, version)

    def close_extras(self, **kwargs: Any) -> None:
        """Leave no process, container or file behind. May be called twice."""
        self._finalizer.detach()
        self._sessions.close()

    def _renders(self) -> bool:
        if self.render_mode is None:
            gym.logger.warn('nothing is rendered: make the environment with render_mode="ansi"')
        return self.render_mode is not None


class HarnessEnv(OnSessions, gym.Env[Any, Any]):
    """An environment in which an unmodified harness works on a task.

    Observation: `task_id`, `instruction`; after the step also `message` (the harness's last words) and `diff`.
    Action: sampling overrides (`temperature`, `top_p`, `top_k`) and an optional `instruction`; `{}` is the default.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, *arguments: Any, render_mode: str | None = None, **settings: Any) -> None:
        """`arguments` and `settings` are those of `set_up`. Raises `ConfigError`."""
        super().__init__(self.set_up(*arguments, **settings), render_mode)
        self.observation_space = observation_space()
        self.action_space = action_space()
        self._shown: SessionLife | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Prepare the sandbox of a task: `options["task_id"]`, or one drawn at random. `options["branch"]`: an episode
        and a number of calls: the session begins with so many calls of the episode, and the policy goes on from there.
        `options["sample_index"]`: with task and `sampling.seed` it makes the seeds of the session's calls; default: one
        more than the largest that this environment began the task with, or 0.

        Raises `KeyError` for an unknown task or option, `ValueError` for a wrong sample index, and `RuntimeError` when
        the sandbox does not come up.
        """
        super().reset(seed=seed)
        options = options or {}
        check_options(options, "task_id", "branch", "sample_index")
        sample = sample_index(options.get("sample_index"))
        branch = options.get("branch")
        if branch is None:
            request = choose(self._requests, options.get("task_id"), self.np_random)
        else:
            request = branched(branch, options.get("task_id"))
        life = self._sessions.prepare({0: request}, {0: sample})[0]
        if life.session.failure is not None:
            self._sessions.abandon(0)
            raise RuntimeError(f"task {request.task_id}: {life.session.failure.message}")
        self._shown = life
        return observe(life), {"session": life.session}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the harness to its end. The reward of a failed session is 0.0, with `info["failure"]` set: mask it."""
        life = self._sessions.open(0)
        if life is None:
            raise gym.error.ResetNeeded("call reset() before step(): an episode has one step")
        check_action(action, self.action_space)
        apply(action, life)
        episode = self._sessions.play([0])[0]
        return observe(life, episode), *outcome(episode)

    def render(self) -> str | None:  # type: ignore[override]
        """Return the transcript of this episode so far. Another thread may call this while `step` runs."""
        return show(self._shown) if self._renders() else None

    def close(self) -> None:
        self.close_extras()


def branched(branch: Any, task_id: str | None = None) -> TaskRequest:
    """Return the request of `options["branch"]`. Raises `TypeError` for another value, `ConfigError`, and `ValueError`
    where the branch's task is another one than `task_id`."""
    if not (isinstance(branch, tuple) and len(branch) == 2 and isinstance(branch[0], Episode)):
        raise TypeError(f"options['branch'] must be (episode, number of calls), got {branch!r}"[:300])
    request = branch_of(*branch)
    if task_id not in (None, request.task_id):
        raise ValueError(f"options['task_id']={task_id!r}: the branch is of task {request.task_id!r}; leave it out")
    return request


def sample_index(given: Any) -> int | None:
    """Return the sample index that `reset` was given, if any. Raises `ValueError` for another value."""
    if given is not None and (not isinstance(given, (int, np.integer)) or given < 0):
        raise ValueError(f"options['sample_index'] must be an int, at least 0, got {given!r}")
    return None if given is None else int(given)


def check_options(options: Mapping[str, Any], *known: str) -> None:
    """Raise `KeyError` for an unknown option of `reset`."""
    if unknown := options.keys() - set(known):
        raise KeyError(f"unknown reset option {sorted(unknown)[0]!r}; known: {', '.join(known)}")


def choose(requests: Mapping[str, TaskRequest], task_id: str | None, chance: np.random.Generator) -> TaskRequest:
    """Return the task with an id, or one drawn at random. Raises `KeyError` for an unknown id."""
    check_task_id(task_id, requests)
    return requests[task_id if task_id is not None else list(requests)[int(chance.integers(len(requests)))]]


def check_task_id(task_id: str | None, requests: Mapping[str, TaskRequest]) -> None:
    """Raise `KeyError` for an unknown task id."""
    if task_id is not None and task_id not in list(requests):  # a list: an id of another type may not be hashable
        raise KeyError(f"unknown task_id {task_id!r}; known: {', '.join(requests)}")


def check_action(action: Any, space: gym.Space[Any], of: str = "") -> None:
    """Raise `ValueError` for an action outside of the space. `of`: words for the error, e.g. the sub-environment."""
    if action not in space:
        raise ValueError(f"action {action!r}{of} is not in {space}; {{}} is the default action")


def apply(action: Action, life: SessionLife) -> None:
    """Apply the overrides of an action to a session. They win over the config."""
    changes = {name: np.asarray(action[name]).item() for name in ("temperature", "top_p", "top_k") if name in action}
    if changes:
        life.capture.sampling = Sampling.model_validate({**life.capture.sampling.model_dump(), **changes})
        life.request.sampling = life.capture.sampling
    if action.get("instruction"):
        life.request.instruction = action["instruction"]


def observe(life: SessionLife, episode: Episode | None = None) -> Observation:
    """Return the observation of a session, with message and diff once the session has an episode."""
    return {
        "task_id": life.request.task_id,
        "instruction": life.request.instruction,
        "message": episode.artifacts.final_message if episode else "",
        "diff": episode.artifacts.diff if episode else "",
    }


def outcome(episode: Episode) -> tuple[float, bool, bool, dict[str, Any]]:
    """Return reward, terminated, truncated and info of an episode."""
    info = {"trajectory": episode, **told(episode.session)}
    return episode.reward or 0.0, not episode.truncated, episode.truncated, info


def told(session: Session) -> dict[str, Any]:
    """Return the info about a session, with `failure` where the session has failed."""
    return {"session": session} | ({"failure": session.failure} if session.failure is not None else {})


def show(life: SessionLife | None) -> str:
    """Return the transcript of a session; empty before the first session."""
    if life is None:
        return ""
    session = life.session
    headline = f"{session.task_id} #{session.sample_index}, {session.harness}, {session.status}"
    return transcript(headline, list(life.capture.calls))
