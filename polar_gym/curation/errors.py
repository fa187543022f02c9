"""The error of a request to make or validate tasks."""

from __future__ import annotations

from polar_gym.errors import ConfigError


class CurationError(ConfigError):
    """The input does not make a task. The message says why, and which input to try instead."""
