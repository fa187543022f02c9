# pyright: reportMissingImports=false
"""NeMo RL's real `NemoGym` actor in a Ray of its own, with NeMo Gym's real servers.

NeMo RL runs the actor and the servers in a separate environment, with older versions of `openai` and `mcp`. Here that
is `$POLAR_GYM_CACHE/nemo-rl/gym/venv`. All other packages are those of the trainer's environment. NeMo Gym comes from
the checkout's submodule, and is not installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polar_gym.nemo import AGENT, component_root
from tests.nemo_rl.environment import install_beside

REQUIREMENTS = (
    *("openai<=2.7.2", "anthropic<=0.109.2", "mcp>=1.28.1,<2", "ray[default]>=2.55.1"),
    *("devtools", "itsdangerous", "pydot", "yappi"),
)
SUBMODULE = Path("3rdparty") / "Gym-workspace" / "Gym"
SERVERS = (AGENT, Path("responses_api_models") / "vllm_model")
ACTOR = "nemo_rl.environments.nemo_gym.NemoGym"


def gym_checkout(checkout: Path) -> Path | None:
    """Return the NeMo Gym of a checkout of NeMo RL; None where the submodule is empty."""
    directory = checkout / SUBMODULE
    return directory if (directory / "nemo_gym" / "rollout_collection.py").exists() else None


@contextmanager
def nemo_gym_actor(config: Any, policy_url: str, tokenizer: Any, gym: Path) -> Iterator[Any]:
    """Start the actor as NeMo RL does, and give its handle. `config`: NeMo RL's. `gym`: NeMo Gym's checkout."""
    import ray
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor

    python, before = install_beside(Path(sys.executable), "gym/venv", REQUIREMENTS), dict(os.environ)
    ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = str(python)
    with tempfile.TemporaryDirectory(prefix="nrl-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        for server in SERVERS:
            (directory / "venvs" / server).mkdir(parents=True)
            (directory / "venvs" / server / ".venv").symlink_to(python.parent.parent)
        os.environ |= {
            "NEMO_GYM_EXTRA_ROOTS": str(component_root()),
            "NEMO_GYM_VENV_DIR": str(directory / "venvs"),
            "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{gym}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=f"{directory}/ray")
        try:
            config.env["nemo_gym"] |= {"skip_venv_if_present": True}
            actor = spinup_nemo_gym_actor(
                config.env,
                [policy_url],
                "policy",
                tokenizer=tokenizer,
                enable_router_replay=False,
                routed_experts_dtype="int16",
                use_fastokens=False,
            )
            try:
                yield actor
            finally:
                ray.get(actor.shutdown.remote())
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ |= before
