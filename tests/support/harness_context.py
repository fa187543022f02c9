"""The launch context that the tests of harness files use."""

from __future__ import annotations

from typing import Any

from polar_gym.harnesses import LaunchContext
from polar_gym.schema import HarnessSpec


def context(length: int = 65536, instruction: str = "-do 'é'\n", **spec: Any) -> LaunchContext:
    """Return a launch context. `spec` holds the harness's settings and options, as in a config."""
    return LaunchContext(
        spec=HarnessSpec(name="any", **spec),
        base_url="http://127.0.0.1:8080",
        api_key="secret-key",
        context_length=length,
        instruction=instruction,
        home="/home/agent",
        workdir="/workspace",
        executable=["node", "harness.js"],
    )
