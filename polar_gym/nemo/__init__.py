"""The NeMo Gym front door: the agent server `polar_agent` and the environment `polar_swe`.

NeMo Gym finds agents and environments by folder, not by entry point, so `root/` is a component root that ships as
package data; `polar-gym nemo-root` prints where it is. Its `app.py` is a thin adapter: everything it does is here, and
nothing here imports NeMo Gym. `rollouts` runs sessions on the gateway's nodes, `verified` makes of an episode what
`/run` answers, `output` and `envelope` are the two forms in which that answer carries the tokens.
"""

from __future__ import annotations

from pathlib import Path

from polar_gym.composition import shipped_dir

AGENT = Path("responses_api_agents") / "polar_agent"
"""The agent server's folder in a component root."""


def component_root() -> Path:
    return Path(__file__).parent / "root"


def recipes() -> Path:
    """Where the configs for NeMo RL are."""
    return shipped_dir("recipes") / "nemo_rl"


def link_agent(directory: Path) -> Path:
    """Put a link to the agent server's folder into `directory`, for NeMo Gym 0.4, which looks for it nowhere else.

    Raises `FileExistsError` when something else is there.
    """
    link, target = directory / AGENT, component_root() / AGENT
    if link.is_symlink() and link.resolve() == target.resolve():
        return link
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link
