"""Shared by wire formats: the headers of a key, and server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

LINE_BREAKS = {
    break_.encode(): f"\\u{ord(break_):04x}".encode()
    for break_ in "\N{NEXT LINE}\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"
}
"""Line breaks that JSON may hold raw -> their escapes. They end no line of an event, but some clients (httpx's
`aiter_lines`, which Mistral Vibe uses) cut lines there."""


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
    """Return one server-sent event, whose data is one line also for clients that know other line breaks than `\\n`."""
    name, text = f"event: {event}\n".encode() if event else b"", orjson.dumps(data)
    for raw, escaped in LINE_BREAKS.items():
        text = text.replace(raw, escaped)
    return name + b"data: " + text + b"\n\n"
