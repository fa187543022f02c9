"""Keeps aiohttp's servers from inflating bodies and from logging keys.

aiohttp inflates a compressed body while it parses the request: on the event loop, and before any key is checked. A
small body can hold hundreds of megabytes of zeros. No harness compresses, so all ports refuse compressed bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError


class _WithoutHeads(logging.LoggerAdapter[logging.Logger]):
    """A logger of malformed heads that tells the kind of each error. aiohttp's own text quotes a line of the head,
    which may hold a key."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            return f"{msg}: {type(error).__name__}", {**kwargs, "exc_info": None}
        return msg, kwargs


# No access log: some clients send their key in the URL.
SERVER_OPTIONS: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "logger": _WithoutHeads(logging.getLogger("aiohttp.server")),
}
"""The options of `aiohttp.web.Server` that every port has."""


def compression(request: web.BaseRequest) -> str:
    """Return the message that refuses a request whose body is compressed; "" for any other request."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() == "identity":
        return ""
    return f"Content-Encoding: {encoding[:50]}: compressed bodies are refused; send it without compression"
