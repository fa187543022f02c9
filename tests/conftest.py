"""Shared fixtures and settings."""

import signal

import pytest
from hypothesis import settings

from tests.docker_daemon import docker_host

__all__ = ["docker_host"]

# A law does not depend on how busy the machine is.
settings.register_profile("laws", deadline=None)
settings.load_profile("laws")

# A shell lets what it runs in the background ignore SIGINT, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`pytest -n`), the tests of a file stay together, and so do all that need a real vLLM or
    NeMo Gym: one such engine fills a small machine."""
    for item in items:
        needs_engine = item.path.parent.name == "e2e" and ("vllm" in item.path.name or "nemo" in item.path.name)
        needs_engine = needs_engine or "vllm_server" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("engine" if needs_engine else str(item.path)))
