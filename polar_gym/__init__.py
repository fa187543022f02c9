"""Reinforcement learning over unmodified agent command-line harnesses.

`import polar_gym` registers the environments `polar/swe` and `polar/task` with gymnasium. The names in `__all__` are
what a trainer needs; each is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polar_gym.envs.registration import register_environments

if TYPE_CHECKING:
    from polar_gym.client import RolloutClient, SyncRolloutClient
    from polar_gym.config.loading import load_config
    from polar_gym.errors import ConfigError
    from polar_gym.schema import Episode, TaskRequest, Trace
    from polar_gym.training import make_batch, padded

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Episode",
    "RolloutClient",
    "SyncRolloutClient",
    "TaskRequest",
    "Trace",
    "__version__",
    "load_config",
    "make_batch",
    "padded",
]

_HOMES = {
    "ConfigError": "errors",
    "Episode": "schema",
    "RolloutClient": "client",
    "SyncRolloutClient": "client",
    "TaskRequest": "schema",
    "Trace": "schema",
    "load_config": "config.loading",
    "make_batch": "training",
    "padded": "training",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    """Return a public name from its module. Python calls this for names that are not in this module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


register_environments()
