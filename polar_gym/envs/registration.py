"""Registers the environments with gymnasium, without loading gymnasium.

gymnasium knows no entry points: a package of environments is imported, and registers them itself. The clients and the
command line import polar_gym too, and need no gymnasium. Where gymnasium is not loaded yet, the environments are
therefore registered as soon as its registry is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

REGISTRY = "gymnasium.envs.registration"


def register_environments() -> None:
    """Register `polar/swe` and `polar/task` now, or as soon as gymnasium's registry is loaded."""
    if REGISTRY in sys.modules:
        _register(import_module(REGISTRY))  # waits for another thread that is still loading the registry
    else:
        sys.meta_path.insert(0, _RegistryFinder())


class _RegistryFinder:
    """Finds gymnasium's registry where Python itself would, and has the environments registered once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register
        return spec


def _register(registration: Any) -> None:
    """Register the environments in gymnasium's registry, where they are not in it yet."""
    for name, prefix in {"swe": "Swe", "task": "Task"}.items():
        if f"polar/{name}" not in registration.registry:
            registration.register(
                id=f"polar/{name}",
                entry_point=f"polar_gym.envs.{name}:{prefix}Env",
                vector_entry_point=f"polar_gym.envs.{name}:{prefix}VectorEnv",
                nondeterministic=True,
            )
