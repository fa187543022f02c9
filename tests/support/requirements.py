"""Checks of the parts that a test needs. A missing part is a failure in CI, and a skip with the install elsewhere."""

import os
import shutil
from pathlib import Path

import pytest


def need(present: object, what: str, install: str) -> None:
    """Fail (in CI) or skip (elsewhere) unless `present`."""
    if present:
        return
    message = f"{what} is missing; install it with: {install}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def need_program(name: str, install: str) -> None:
    need(shutil.which(name), name, install)


def need_bubblewrap() -> None:
    need_program("bwrap", "apt-get install bubblewrap")


def need_node() -> None:
    need_program("node", "https://nodejs.org (>= 20)")


def need_a_checkout_that_all_may_read() -> None:
    """For programs that begin as root and go on as another user, who runs files of the checkout."""
    closed = [str(place) for place in Path(__file__).resolve().parents if not place.stat().st_mode & 0o001]
    need(not closed, "a checkout that all users may read", f"chmod o+x {' '.join(closed)}, or clone it elsewhere")
