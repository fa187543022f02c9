"""The settings of `polar-gym serve` beside the config of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, Field, model_validator

from polar_gym.errors import ConfigError, validated
from polar_gym.gateway.node.settings import ListenSettings, several, split_own
from polar_gym.paths import NamedPath, shipped_dir
from polar_gym.record import Record
from polar_gym.service.bounds import Limits


class ClusterSpec(Record):
    """The nodes of a server. The choices and their defaults are the files of `conf/cluster/`."""

    name: Literal["none", "local", "ray"]
    """Where the nodes come from. `local`: one node in this process. `ray`: Ray starts one node on each of its machines.
    `none`: the operator starts the nodes."""
    address: str | None = None
    """ray: the address of the running cluster; null: RAY_ADDRESS, or else a new cluster on this machine."""
    nodes: int | None = Field(default=None, gt=0)
    """ray: the number of nodes at most; null: one on every machine."""
    num_cpus: float = Field(default=1.0, ge=0)
    """ray: the CPUs that Ray sets aside for each node."""
    resources: dict[str, float] = Field(default_factory=dict)
    """ray: the resources that a machine must have for a node, e.g. {gateway: 1}."""
    state: NamedPath = Path("state/nodes")
    """ray: the directory of each machine in which its node keeps sessions."""

    @model_validator(mode="after")
    def _of_ray(self) -> Self:
        if self.name != "ray" and (others := self.model_fields_set - {"name"}):
            raise ValueError(f"{', '.join(sorted(others))}: only with cluster=ray")
        return self


class ServeSettings(Limits, ListenSettings):
    """The settings of the rollout server."""

    listen: str = "127.0.0.1:8700"
    """Host and port of the HTTP API; port 0: any free port."""
    url: str | None = None
    """The URL at which nodes reach this server; null: at `listen`."""
    state: NamedPath = Path("state")
    """The directory of the database and the episodes. One process at a time may use it."""
    learning: Annotated[list[Path], BeforeValidator(several)] = Field(default=[])
    """Directories of `polar-gym learn`, whose curves the page of the server shows: learning=DIR,..."""
    cluster: ClusterSpec


def split_settings(arguments: Sequence[str]) -> tuple[ServeSettings, list[str]]:
    """Return the server's own settings, and the `key=value` settings of its nodes. Raises `ConfigError`."""
    changes = [argument for argument in arguments if argument.startswith("cluster.")]
    own, others = split_own([argument for argument in arguments if argument not in changes], ServeSettings)
    cluster = _cluster(own.pop("cluster", "local"), [change.removeprefix("cluster.") for change in changes])
    return validated(ServeSettings, {**own, "cluster": cluster}), others


def _cluster(name: str, changes: Sequence[str]) -> Any:
    """Return the values of a file of `conf/cluster/` with changes. Raises `ConfigError`."""
    directory = shipped_dir("conf") / "cluster"
    known = sorted(path.stem for path in directory.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"cluster={name!r}: unknown cluster; known: {', '.join(known)}")
    try:
        composed = OmegaConf.merge(OmegaConf.load(directory / f"{name}.yaml"), OmegaConf.from_dotlist(list(changes)))
        return OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cluster: {error}") from error
