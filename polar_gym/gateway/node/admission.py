"""Decides which parts of a machine a request may name.

A request is data, and a client that can post one is not the machine's operator. The operator chooses code, files,
programs and networks of the machine: by the config of a node, by its settings `imports` and `directories`, and by
installing plug-ins, which a request may name. The server checks each request before it takes the request, and a node
checks it again, because the server may be another operator's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_gym import registry
from polar_gym.builders import BUILDERS
from polar_gym.config.checking import check_plugin
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.gateway.node.settings import ListenSettings
from polar_gym.harnesses import HARNESSES
from polar_gym.http.keys import NODE_KEY, SERVICE_KEY
from polar_gym.registry import Names
from polar_gym.runtimes import RUNTIMES
from polar_gym.runtimes.image_names import image_file
from polar_gym.schema import BuilderSpec, EvaluatorSpec, HarnessSpec, PluginSpec, RuntimeSpec, TaskRequest
from polar_gym.tasks.bundled import SUITE
from polar_gym.tasks.confined import confined_workspace
from polar_gym.workspaces.requirements import check_requirement


@dataclass(frozen=True, slots=True)
class Named:
    """A part of the machine that an option names."""

    key: str
    kind: Names
    value: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The parts of the machine that the operator of one process lets requests name."""

    imports: frozenset[str] = frozenset()
    directories: tuple[Path, ...] = (SUITE.parent,)
    """The directories below which workspaces and image files may be."""
    own: frozenset[Named] | None = frozenset()
    """The names in the config of the nodes: a request may use each in the same option; None: only the nodes know."""
    keyed: bool = False
    """True where every port that this process knows asks for a key."""


def allowed_by(settings: ListenSettings, config: RunConfig | None, *, keyed: bool) -> Allowed:
    """Return the parts of its machine that a process lets requests name.

    `config`: the config of the nodes; None: the nodes have their own.
    """
    own = None
    if config is not None:
        own = frozenset(_named_by(config.runtime, config.harness, config.builder, config.evaluator))
    files = (Path(named.value) for named in own or () if named.kind is Names.PATH)
    return Allowed(
        imports=frozenset(settings.imports),
        directories=(SUITE.parent, *settings.directories, *files),
        own=own,
        keyed=keyed,
    )


def check_request(request: TaskRequest, allowed: Allowed) -> None:
    """Raise `ConfigError` for a request that names a part of the machine that it may not name.

    The message names the field, its value and the fix. A refused import path was not imported. The check blocks.
    """
    for named in _named_by(request.runtime, request.agent, request.builder, request.evaluator):
        _check(named, allowed)
    if request.start_from is not None:
        if request.start_from.owned:
            raise ConfigError(
                "start_from.owned=true: two sessions would train the record's tokens; leave it out, which branches the "
                "record, or use `polar-gym rollout --resume`"
            )
        _check(Named("start_from.record", Names.PATH, request.start_from.record), allowed)
    for requirement in request.runtime.workspace.python_requirements:
        try:
            check_requirement(requirement)
        except ValueError as error:
            raise ConfigError(f"runtime.workspace.python_requirements={requirement!r}: {error}") from error
    check_network(request.runtime, allowed)


def check_network(spec: RuntimeSpec, allowed: Allowed) -> None:
    """Raise `ConfigError` where a harness would reach ports of the machine that ask for no key."""
    if spec.network != "full" or allowed.keyed:
        return
    shares_network = getattr(check_plugin("runtime", RUNTIMES, spec), "shares_network", None)
    if shares_network is None or shares_network():
        raise ConfigError(
            f"runtime.network='full': with runtime={spec.name} a harness reaches the ports of this machine, and the "
            f"service's ask for no key; set {SERVICE_KEY} and {NODE_KEY}, or runtime=docker"
        )


def _check(named: Named, allowed: Allowed) -> None:
    """Raise `ConfigError` where a request may not name this part of the machine."""
    if allowed.own is not None and named in allowed.own:
        return
    said = f"{named.key}={named.value!r}"
    if named.kind is Names.CODE and named.value not in allowed.imports:
        raise ConfigError(
            f"{said}: a request names no code; the operator of the service may allow it: imports={named.value}"
        )
    if named.kind is Names.PATH:
        try:
            confined_workspace(Path(named.value), allowed.directories)
        except ValueError as error:
            raise ConfigError(f"{said}: {error}; the operator of the service may allow it: directories=DIR") from error
    if named.kind is Names.OTHER and allowed.own is not None:
        raise ConfigError(
            f"{said}: a request may only repeat what the config of the node has; leave it out, or set the same there"
        )


def _named_by(
    runtime: RuntimeSpec, harness: HarnessSpec, builder: BuilderSpec, evaluator: EvaluatorSpec
) -> Iterator[Named]:
    """Yield the parts of the machine that a request or a config names. Raises `ConfigError`."""
    if runtime.workspace.source is not None:
        yield Named("runtime.workspace.source", Names.PATH, runtime.workspace.source)
    if runtime.image is not None:
        try:
            file = image_file(runtime.image)
        except ValueError as error:
            raise ConfigError(f"runtime.image={runtime.image!r}: {error}") from error
        if file is not None:
            yield Named("runtime.image", Names.PATH, str(file))
    if runtime.scope == "container":  # the harness is root there
        yield Named("runtime.scope", Names.OTHER, runtime.scope)
    yield from _named("runtime", RUNTIMES, runtime)
    yield from _named("agent", HARNESSES, harness)
    yield from _named("builder", BUILDERS, builder)
    yield from _named("evaluator", EVALUATORS, evaluator)


def _named(key: str, plugins: registry.Registry[Any], spec: PluginSpec) -> Iterator[Named]:
    """Yield the parts of the machine that a plug-in's spec names.

    The import path comes first: the plug-in is imported only when the caller asks for the next part.
    """
    if ":" in spec.name:
        yield Named(f"{key}.name", Names.CODE, spec.name)
    for option, (kind, default) in _marked(plugins, spec.name).items():
        value = spec.options.get(option)
        if isinstance(value, Mapping) and value:
            yield Named(f"{key}.{option}", kind, json.dumps(value, sort_keys=True))
        if isinstance(value, str | Path) and value != default and (kind is not Names.CODE or ":" in str(value)):
            yield Named(f"{key}.{option}", kind, str(value))
    parts = spec.options.get("components")  # of `composite`
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping) and isinstance(part.get("name"), str):
            yield from _named(f"{key}.components.{name}", plugins, PluginSpec.model_validate(part))


def _marked(plugins: registry.Registry[Any], name: str) -> dict[str, tuple[Names, Any]]:
    """Return the options that name a part of the machine, with their defaults; none for a plug-in of nodes only."""
    try:
        fields = plugins.accepted(name).model_fields
    except (registry.UnknownNameError, ImportError):
        return {}
    marks = {option: [mark for mark in field.metadata if isinstance(mark, Names)] for option, field in fields.items()}
    return {option: (mark[0], fields[option].default) for option, mark in marks.items() if mark}
