"""Explains in plain words why an HTTP request failed, for logs and terminals."""

from __future__ import annotations

import os
import socket

import aiohttp

from polar_gym.protocol import ErrorAnswer


def reason(error: Exception) -> str:
    """Describe an aiohttp error; aiohttp's own messages mention connectors and repeat the URL."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it hung up without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def error_text(answer: bytes) -> str:
    """Return the message of an error's body: that of an `ErrorAnswer`, or the beginning of another text."""
    try:
        return ErrorAnswer.from_json(answer).error
    except ValueError:
        return answer[:500].decode(errors="replace")
