"""The plug-ins that a request names, found and checked once for the edge, the node and the session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polar_gym.evaluators import Evaluator
from polar_gym.harnesses import Harness
from polar_gym.registry import Registry
from polar_gym.runtimes import Runtime
from polar_gym.schema import PluginSpec

ReadOptions = Callable[[str, Registry[Any], PluginSpec], Any]
"""(field of the request, registry of the room, plug-in) -> the plug-in's checked options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """The plug-ins of one request. All options are checked, and nothing is started."""

    harness: Harness
    evaluator: Evaluator
    runtime: Runtime


def read_options(key: str, registry: Registry[Any], spec: PluginSpec) -> Any:
    """Return the checked options of a plug-in. Raises `UnknownNameError` or `pydantic.ValidationError`."""
    return registry.options(spec)
