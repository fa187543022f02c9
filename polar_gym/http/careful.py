"""Keeps aiohttp's servers from inflating bodies.

aiohttp inflates a compressed body while it parses the request: on the event loop, and before any key is checked. A
small body can hold hundreds of megabytes of zeros. No harness compresses, so all ports refuse compressed bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

# No access log: some clients send their key in the URL.
SERVER_OPTIONS: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
}
"""The options of `aiohttp.web.Server` that every port has."""


def compression(request: web.BaseRequest) -> str:
    """Return the message that refuses a request whose body is compressed; "" for any other request."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() == "identity":
        return ""
    return f"Content-Encoding: {encoding[:50]}: compressed bodies are refused; send it without compression"
