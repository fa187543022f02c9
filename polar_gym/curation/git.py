"""Runs git on this machine, without the user's and the machine's settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from polar_gym.curation import CurationError


def run_git(directory: Path, *arguments: str, more: Mapping[str, str] | None = None) -> bytes:
    """Return the output of git in a directory. `more`: more variables. Raises `CurationError`, and `OSError` where the
    directory is missing."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **(more or {})}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "1"}
    environment |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    done = subprocess.run(["git", *arguments], cwd=directory, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise CurationError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
