"""Why an HTTP request got no answer, in words for whoever reads a log or a terminal."""

from __future__ import annotations

import os
import socket

import aiohttp


def reason(error: Exception) -> str:
    """Of what aiohttp raises; its own words tell of connectors, and repeat the address."""
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
