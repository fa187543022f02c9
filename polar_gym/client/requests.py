"""Reads TaskRequests from a file with one JSON object a line."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from polar_gym.durable import records
from polar_gym.errors import ConfigError
from polar_gym.schema import TaskRequest


def read_requests(file: str) -> list[TaskRequest]:
    """Read the requests of a file; `-` is stdin.

    Raises `ConfigError` that names the line, the field, its value and the allowed values.
    """
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as lines:
            requests = list(records(lines, file, TaskRequest, "a task request"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if not requests:
        raise ConfigError(f"{file}: holds no request")
    return requests
