"""Shared by wire formats: the headers of a key, and server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's value, whatever the case of its name in a plain mapping."""
    for key, value in headers.items():
        if key.lower() == name:
            return value
    return None


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """Return the key in `Authorization: Bearer <key>`."""
    scheme, _, key = (header(headers, "authorization") or "").partition(" ")
    return (key.strip() or None) if scheme.lower() == "bearer" else None


def sse(data: dict[str, Any], event: str | None = None) -> bytes:
    """Return one server-sent event. JSON escapes line breaks, so the data is always one line."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + orjson.dumps(data) + b"\n\n"
