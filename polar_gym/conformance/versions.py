"""The newest published version of a harness."""

from __future__ import annotations

import subprocess
import sys

from polar_gym.errors import ConfigError
from polar_gym.harnesses import Harness

TIMEOUT_SECONDS = 120


def newest(harness: Harness) -> str:
    """Return the newest version that npm or PyPI offers this machine. Raises `ConfigError`."""
    package = str(harness.package)
    if harness.npm_package:
        command = ["npm", "view", package, "version"]
    else:
        command = [sys.executable, "-I", "-m", "pip", "index", "versions", package, "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the newest version of {package} is not known: {error}") from error
    first = next(iter(done.stdout.split("\n")), "").strip()
    if done.returncode != 0 or not first:
        said = next((line for line in done.stderr.splitlines() if "rror" in line), done.stderr.strip())
        raise ConfigError(f"the newest version of {package} is not known; is its registry reachable? {said}")
    return first if harness.npm_package else first.removeprefix(f"{package} (").removesuffix(")")
