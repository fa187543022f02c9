"""The NeMo Gym front door: the agent server `polar_agent` and the environment `polar_swe`.

NeMo Gym finds agents and environments by folder, not by entry point, so `root/` is a component root that ships as
package data; `polar-gym nemo-root` prints where it is, or where its variant for 0.7 and later was put together. Its
`app.py` is a thin adapter: everything it does is here, and nothing here imports NeMo Gym. `rollouts` runs sessions on
the gateway's nodes, `verified` makes of an episode what `/run` answers, `output` and `envelope` are the two forms in
which that answer carries the tokens.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polar_gym import durable
from polar_gym.paths import shipped_dir

AGENT = Path("responses_api_agents") / "polar_agent"
"""The agent server's folder in a component root."""


ENVIRONMENT = Path("environments") / "polar_swe"

DECLARED_SINCE = (0, 7)
"""NeMo Gym from this version on wants an environment server declared for each agent; earlier ones refuse it."""


def component_root() -> Path:
    """As it ships: for every version of NeMo Gym, with a deprecation warning from 0.7 on."""
    return Path(__file__).parent / "root"


def installed_gym() -> str | None:
    """The version of the NeMo Gym beside this package, if there is one."""
    try:
        return version("nemo-gym")
    except PackageNotFoundError:
        return None


def component_root_for(gym: str | None, cache: Path) -> Path:
    """The component root that suits a version of NeMo Gym (None: not known).

    From 0.7 on it is made in `cache`: links to what ships, and the environment's config with its server declared.
    Raises `ValueError` when `gym` is no version.
    """
    try:
        numbers = tuple(int(number) for number in (gym or "0.0").split(".")[:2])
    except ValueError as error:
        raise ValueError(f"{gym!r} is no version of NeMo Gym; expected e.g. 0.7.0") from error
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


def recipes() -> Path:
    """Where the configs for NeMo RL are."""
    return shipped_dir("recipes") / "nemo_rl"


def link_agent(directory: Path) -> Path:
    """Put a link to the agent server's folder into `directory`, for NeMo Gym 0.4, which looks for it nowhere else.

    Raises `FileExistsError` when something else is there.
    """
    return _link(directory / AGENT, component_root() / AGENT)


def _link(link: Path, target: Path) -> Path:
    if not (link.is_symlink() and link.resolve() == target.resolve()):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return link
