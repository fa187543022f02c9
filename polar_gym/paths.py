"""Paths that every run uses: shipped files, the cache, and files that must be writable before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from polar_gym.errors import ConfigError


def _named(value: Any) -> Any:
    """Return the value. Raises `ValueError` for an empty one, which pathlib takes for the working directory."""
    if value == "":
        raise ValueError("is empty; name a path")
    return value


NamedPath = Annotated[Path, BeforeValidator(_named)]


def shipped_dir(name: str) -> Path:
    """Return the directory `conf` or `recipes`: inside the installed package, or beside the package in a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def cache_dir() -> Path:
    """Return the directory of harnesses and environments: `$POLAR_GYM_CACHE`, else one in the XDG cache directory.

    It is kept between runs.
    """
    if chosen := os.environ.get("POLAR_GYM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar-gym"


def check_writable(key: str, file: Path) -> None:
    """Raise `ConfigError` where the file cannot be written. Make its folder; leave its content as it is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{key}={str(file)!r}: {error.strerror}; name a file that can be written") from error
