"""TaskRequests from a file, one JSON object a line."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from pydantic import ValidationError

from polar_gym.errors import ConfigError, explain
from polar_gym.schema import TaskRequest


def read_requests(file: str) -> list[TaskRequest]:
    """`-` is stdin. Raises `ConfigError` naming the line, the field, its value and what is allowed."""
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    requests = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append(TaskRequest.from_json(line))
        except ValidationError as error:
            raise ConfigError(f"{file}:{number}: {explain(error, TaskRequest)}") from error
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{file}:{number}: not JSON: {error}") from error
    if not requests:
        raise ConfigError(f"{file}: holds no request")
    return requests
