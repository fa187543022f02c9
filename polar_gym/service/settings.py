"""What `polar-gym serve` is told besides what its nodes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from polar_gym.errors import ConfigError, explain
from polar_gym.gateway.node.settings import ListenSettings, split_own
from polar_gym.paths import shipped_dir
from polar_gym.record import Record
from polar_gym.service.service import Limits

DEFAULTS = Limits()


class ClusterSpec(Record):
    """Which nodes there are; the choices and their defaults are the files of `conf/cluster/`."""

    name: Literal["none", "local", "ray"]
    """Where the nodes come from: `local` is one in this process, `ray` has Ray place one on each of its machines, with
    `none` others start them."""
    address: str | None = None
    """ray: of the running cluster; null: what RAY_ADDRESS says, else a new one on this machine."""
    nodes: int | None = Field(default=None, gt=0)
    """ray: at most so many; null: one on every machine."""
    num_cpus: float = Field(default=1.0, ge=0)
    """ray: set aside on the machine for each node."""
    resources: dict[str, float] = Field(default_factory=dict)
    """ray: what a machine must have for a node to be placed on it, e.g. {gateway: 1}."""
    state: Path = Path("state/nodes")
    """ray: where nodes keep their sessions, on each machine."""

    @model_validator(mode="after")
    def _of_ray(self) -> Self:
        if self.name != "ray" and (others := self.model_fields_set - {"name"}):
            raise ValueError(f"{', '.join(sorted(others))}: only with cluster=ray")
        return self


class ServeSettings(ListenSettings):
    """The rollout server."""

    listen: str = "127.0.0.1:8700"
    """Host and port of the HTTP API; port 0: any that is free."""
    url: str | None = None
    """Where nodes reach this server; null: at `listen`."""
    state: Path = Path("state")
    """The database and the episodes. One process at a time."""
    cluster: ClusterSpec
    lease_seconds: float = Field(default=DEFAULTS.lease_seconds, gt=0)
    """A node that was silent for so long is dead: its sessions are tried elsewhere."""
    keep_seconds: float = Field(default=DEFAULTS.keep_seconds, ge=0)
    """How long ended tasks and fetched episodes are kept."""
    keep_bytes: int = Field(default=DEFAULTS.keep_bytes, ge=0)
    """How much disk fetched episodes may use before the oldest go."""
    refuse_bytes: int = Field(default=DEFAULTS.refuse_bytes, gt=0)
    """New tasks are refused while so much is stored."""

    @property
    def limits(self) -> Limits:
        return Limits(
            lease_seconds=self.lease_seconds,
            keep_seconds=self.keep_seconds,
            keep_bytes=self.keep_bytes,
            refuse_bytes=self.refuse_bytes,
        )


def split_settings(arguments: Sequence[str]) -> tuple[ServeSettings, list[str]]:
    """The server's own `key=value` settings, and those that are its nodes'. Raises `ConfigError`."""
    changes = [argument for argument in arguments if argument.startswith("cluster.")]
    own, others = split_own([argument for argument in arguments if argument not in changes], ServeSettings)
    cluster = _cluster(own.pop("cluster", "local"), [change.removeprefix("cluster.") for change in changes])
    return serve_settings({**own, "cluster": cluster}), others


def serve_settings(values: Mapping[str, Any]) -> ServeSettings:
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, ServeSettings)) from error


def _cluster(name: str, changes: Sequence[str]) -> Any:
    directory = shipped_dir("conf") / "cluster"
    known = sorted(path.stem for path in directory.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"cluster={name!r}: unknown cluster; known: {', '.join(known)}")
    try:
        composed = OmegaConf.merge(OmegaConf.load(directory / f"{name}.yaml"), OmegaConf.from_dotlist(list(changes)))
        return OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cluster: {error}") from error
