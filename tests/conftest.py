"""Shared fixtures and settings."""

import os
import signal

from hypothesis import HealthCheck, settings

from tests.support.docker_daemon import docker_host

__all__ = ["docker_host"]

# A law does not depend on how busy the machine is. In CI it does not depend on luck either: every run tries the same
# inputs, each test as many as it says. `make show-fuzz` tries others.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("laws", settings.get_profile("default"), **COMMON)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "laws")

# A shell lets what it runs in the background ignore SIGINT, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
