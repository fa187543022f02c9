"""Looks up the plug-ins that a config names.

A plug-in is one module, or one package, of its room: `harnesses/pi.py` is the harness `pi` because it defines
`HARNESS`. Modules that define no such constant are the room's own tools. Each room's `__init__.py` holds its registry
(`polar_gym.harnesses.HARNESSES`). Third parties add plug-ins by entry point, in the group of the room's name
(`polar_gym.harnesses`). A config may also name anything importable, as `package.module:attribute`. Task rows and
requests may not (`Names`).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from polar_gym.schema import PluginSpec

T = TypeVar("T")


class Options(BaseModel):
    """Base of every plug-in's options: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class Names(Enum):
    """Marks an option that names something of the gateway's machine: `log_parser: Annotated[str, Names.CODE]`.

    A request may set such an option only where the machine's operator allows it (`polar_gym.gateway.node.admission`).
    """

    CODE = "code"
    """`package.module:attribute`, or `path/to/file.py:function`. A value without a colon names no code."""
    PATH = "path"
    """A file or directory that the harness may read."""
    OTHER = "other"
    """A program, a daemon, a network, or a directory to write into."""


class UnknownNameError(LookupError):
    """A config names a plug-in that does not exist."""


@cache
def _entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group, read once: the search reads the metadata of every installed package, which
    blocks a gateway for 30 ms."""
    return entry_points(group=group)


@cache
def _defines(file: str, constant: str) -> bool:
    """Return whether the text of a module defines a constant. Each is read once: the user may lose the right to it."""
    return re.search(rf"^{constant}\b *[:=]", Path(file).read_text(), re.MULTILINE) is not None


class Registry(Generic[T]):
    """Finds the plug-ins of one room: the built-in modules, entry points, and import paths."""

    def __init__(self, kind: str, group: str, offered: type = object) -> None:
        """Name the registry: `kind` is the config group, `group` the package and entry-point group of its plug-ins.

        `offered` is the class of the plug-ins.
        """
        self.kind = kind
        self.group = group
        self.offered = offered
        self.attribute = kind.upper()

    def names(self) -> list[str]:
        package = importlib.import_module(self.group)
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        built_in = {name for name in modules if self._is_plugin(name)}
        return sorted(built_in | {entry.name for entry in _entry_points(self.group)})

    def get(self, name: str) -> T:
        """Return the plug-in called `name`. Raises `UnknownNameError` with the names that exist."""
        if ":" in name:
            return self._import_path(name)
        for entry in _entry_points(self.group):
            if entry.name == name:
                return entry.load()
        if not name.isidentifier() or not self._is_plugin(name):
            raise self._unknown(name)
        return getattr(importlib.import_module(f"{self.group}.{name}"), self.attribute)

    def _is_plugin(self, name: str) -> bool:
        """Return whether the room has a module of this name that defines the room's constant.

        The module is read and not imported: a plug-in whose own imports fail must not hide the others.
        """
        spec = importlib.util.find_spec(f"{self.group}.{name}")
        if spec is None or spec.origin is None:
            return False
        return _defines(spec.origin, self.attribute)

    def options(self, spec: PluginSpec) -> Any:
        """Return the plug-in's validated options. Raises `UnknownNameError` or `pydantic.ValidationError`."""
        return self.accepted(spec.name).model_validate(spec.options)

    def accepted(self, name: str) -> type[BaseModel]:
        """Return the model of a plug-in's options. Raises `UnknownNameError`."""
        return getattr(self.get(name), "Options", Options)

    def _unknown(self, name: str) -> UnknownNameError:
        known = ", ".join(self.names())
        return UnknownNameError(f"unknown {self.kind} {name!r}; known: {known}, or package.module:attribute")

    def _import_path(self, name: str) -> T:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            problem = f"{error}; install its package, or add its directory to PYTHONPATH"
            raise UnknownNameError(f"unknown {self.kind} {name!r}: {problem}") from error
        except (ImportError, AttributeError) as error:
            raise UnknownNameError(f"unknown {self.kind} {name!r}: {error}") from error
        if not isinstance(found, self.offered):
            problem = f"expected a {self.offered.__name__}, got a {type(found).__name__}"
            raise UnknownNameError(f"unknown {self.kind} {name!r}: {problem}")
        return found


class Makers(Registry[Callable[[Any], T]]):
    """A registry whose plug-ins are made from their options: classes, or functions that return an object."""

    def make(self, spec: PluginSpec) -> T:
        """Return the plug-in that `spec` names, made from its options. Raises like `options`."""
        return self.get(spec.name)(self.options(spec))
