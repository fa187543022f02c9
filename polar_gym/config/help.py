"""Describes every key of a config. It reads the code that checks the config, so that no key can be missing.

Groups and keys are the fields of `RunConfig`. A plug-in's options are the fields of its `Options`. A description is the
docstring below the field. A default is the value in the shipped config, else the field's own.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import MISSING, OmegaConf
from pydantic import BaseModel

from polar_gym.config.files import ROOMS, group_choices
from polar_gym.config.run_config import RunConfig
from polar_gym.paths import shipped_dir
from polar_gym.schema import PluginSpec


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str
    """The whole key, as a user types it: `rollout.num_samples`."""
    type: str
    default: Any
    """`MISSING` where the user must set the key."""
    description: str


@dataclass(frozen=True)
class Section:
    """A group or a part of the config, or the options of one choice of a group."""

    name: str
    """`rollout`, `engine`, or `engine=vllm`."""
    description: str
    choices: dict[str, str]
    """Name -> description; empty for a section that is not a group."""
    keys: list[Key]


def sections() -> Iterator[Section]:
    """Yield every section with its keys, in the order of `RunConfig`."""
    choices, documented = group_choices(), field_docstrings(RunConfig)
    for name, field in RunConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        names = sorted({*choices[name], *ROOMS[name].names()}) if name in ROOMS else []
        own = [key for key in _keys(name, model, {}) if key.name != f"{name}.name"]
        described = {choice: _first_sentence(name, choice) for choice in names}
        yield Section(name, documented.get(name) or _summary(model), described, own)
        for choice in names:
            if (options := ROOMS[name].accepted(choice)).model_fields:
                keys = _keys(name, options, _shipped(f"{name}/{choice}"))
                yield Section(f"{name}={choice}", described[choice], {}, list(keys))


def section_of(name: str, model: type[BaseModel], shipped: Mapping[str, Any]) -> Section:
    """Return the settings of a process. Keys have no prefix, and a nested model's `name` has the key of the model."""
    keys = _keys(name, model, shipped)
    own = [replace(key, name=key.name.removeprefix(f"{name}.").removesuffix(".name")) for key in keys]
    return Section(name, _summary(model), {}, own)


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the string below each field in the source of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _first_sentence(group: str, choice: str) -> str:
    """Return the first paragraph of the docstring of a plug-in's module."""
    plugin = ROOMS[group].get(choice)
    module = inspect.getmodule(plugin if inspect.isclass(plugin) or inspect.isfunction(plugin) else type(plugin))
    own = f"{ROOMS[group].group}.{choice}"
    text = inspect.cleandoc((sys.modules.get(own, module) or module).__doc__ or "")
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(":")


def _keys(prefix: str, model: type[BaseModel], shipped: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the keys of a section. The keys of a nested model stand in its place, with their full names."""
    documented = field_docstrings(model)
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(full, field.annotation, shipped.get(name, {}))
            continue
        default = MISSING if field.is_required() else field.get_default(call_default_factory=True)
        description = field.description or documented.get(name, "")
        yield Key(full, type_name(field.annotation), shipped.get(name, default), description)


def _shipped(config: str) -> Mapping[str, Any]:
    file = shipped_dir("conf") / f"{config}.yaml"
    values = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
    assert isinstance(values, Mapping)
    return {str(key): value for key, value in values.items()}


def _summary(model: type[BaseModel]) -> str:
    """Return the first paragraph of the class's own docstring."""
    paragraph, _, _ = inspect.cleandoc(model.__dict__.get("__doc__") or "").partition("\n\n")
    return " ".join(paragraph.split())


def type_name(annotation: Any) -> str:
    """Return a type in the words of a person who types values, e.g. `list of text`."""
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_name(part) for part in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {type_name(get_args(annotation)[0])}"
    if get_origin(annotation) is dict or annotation is dict:
        return "mapping"
    names = {PluginSpec: "mapping", str: "text", int: "integer", float: "number", bool: "true | false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())
