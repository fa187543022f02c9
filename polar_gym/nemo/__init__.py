"""Connects polar-gym to NeMo Gym: the agent server `polar_agent` and the environment `polar_swe`.

NeMo Gym finds agents and environments by folder, not by entry point. Therefore `root/` is a component root that ships
as package data. `polar-gym nemo-root` prints its path, or the path of a variant made for NeMo Gym 0.7 and later. The
agent server's `app.py` in `root/` is a thin adapter to this room. This room never imports NeMo Gym.

- `rollouts`: runs sessions on nodes in the agent server's process;
- `leftovers`: removes the sandboxes of an agent server that was killed;
- `verified`: makes the answer of `/run` from an episode;
- `output`, `envelope`: the two forms in which the answer carries tokens (`response.output` and `training_traces`);
- `rows`: writes the rows of a data set for NeMo Gym.

The room uses config, gateway.node, gateway.proxy, tasks, builders, engines and schema.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polar_gym import durable

AGENT = Path("responses_api_agents") / "polar_agent"
"""The agent server's folder in a component root."""


ENVIRONMENT = Path("environments") / "polar_swe"

DECLARED_SINCE = (0, 7)
"""From this version on, NeMo Gym wants an environment server declared for each agent. Earlier versions reject that."""


def component_root() -> Path:
    """Return the component root as it ships. It suits all versions of NeMo Gym, with a deprecation warning from 0.7."""
    return Path(__file__).parent / "root"


def installed_gym() -> str | None:
    """Return the version of the NeMo Gym that is installed beside this package, if any."""
    try:
        return version("nemo-gym")
    except PackageNotFoundError:
        return None


def component_root_for(gym: str | None, cache: Path) -> Path:
    """Return the component root that suits a version of NeMo Gym (None: not known).

    From 0.7 on, the root is made in `cache`. It has links to the shipped files, and the environment's config with its
    server declared. Raises `ValueError` when `gym` is not a version.
    """
    try:
        numbers = tuple(int(number) for number in (gym or "0.0").split(".")[:2])
    except ValueError as error:
        raise ValueError(f"{gym!r} is not a version of NeMo Gym; expected e.g. 0.7.0") from error
    if numbers < DECLARED_SINCE:
        return component_root()
    shipped = component_root() / ENVIRONMENT
    config = (shipped / "config.yaml").read_text(encoding="utf-8")
    declared = (shipped / "environment_server.yaml").read_text(encoding="utf-8")
    place = hashlib.sha256(f"{component_root()}\n{config}\n{declared}".encode()).hexdigest()[:16]
    root = cache / "nemo" / "roots" / place
    (root / ENVIRONMENT).mkdir(parents=True, exist_ok=True)
    durable.write(root / ENVIRONMENT / "config.yaml", f"{config}\n{declared}".encode())
    _link(root / AGENT, component_root() / AGENT)
    for file in sorted(shipped.iterdir()):
        if file.name not in ("config.yaml", "environment_server.yaml"):
            _link(root / ENVIRONMENT / file.name, file)
    return root


def link_agent(directory: Path) -> Path:
    """Put a link to the agent server's folder into `directory`, the only place where NeMo Gym 0.4 looks for agents.

    Raises `FileExistsError` when the link's name is taken by another file.
    """
    return _link(directory / AGENT, component_root() / AGENT)


def _link(link: Path, target: Path) -> Path:
    if not (link.is_symlink() and link.resolve() == target.resolve()):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return link
