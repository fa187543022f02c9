"""The options of the docker runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polar_gym.registry import Names
from polar_gym.runtimes.docker.images import PullPolicy
from polar_gym.runtimes.limits import LimitOptions


class DockerOptions(LimitOptions):
    host: Annotated[str | None, Names.OTHER] = None
    """The daemon, on this machine. Default: DOCKER_HOST, else its usual socket."""
    host_usr: bool = True
    """Without an image: an empty one with this machine's /usr, read-only. False: an image is required."""
    gateway: Literal["auto", "namespace", "relay"] = "auto"
    """How the gateway gets into the sandbox's network: by joining it (root only), or by a relay inside."""
    scratch: Annotated[Path | None, Names.OTHER] = None
    """For the relay's socket; a gateway in a container needs one that is mounted at the same path as on the host.
    Default: the system's temporary directory."""
    pull: PullPolicy = "missing"
    """When an image is fetched from its registry: `never`, when it is `missing`, or `always` once by each gateway."""
    bridge: Annotated[str, Names.OTHER] = "bridge"
    """The Docker network that sandboxes with `network: full` join."""
    starts_per_second: float = Field(default=10.0, ge=0.1)
    """How many containers the daemon is asked to begin; it does about five a second on a small machine."""

    def shares_network(self) -> bool:
        return self.bridge == "host" or self.bridge.startswith("container:")
