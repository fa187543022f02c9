"""Shared fixtures and settings."""

import signal

from hypothesis import settings

from tests.docker_daemon import docker_host

__all__ = ["docker_host"]

# A law does not depend on how busy the machine is.
settings.register_profile("laws", deadline=None)
settings.load_profile("laws")

# A shell lets what it runs in the background ignore SIGINT, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
