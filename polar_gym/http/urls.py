"""The check of a URL that a person typed, and the one form of an engine's."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_http_url(text: str) -> bool:
    """Return whether a text is an absolute http or https URL with a host, and with a valid port if it has one."""
    try:
        parts = urlsplit(text)
        (parts.hostname or "").encode("idna")  # raises ValueError where no name has this form
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def engine_url(text: str) -> str:
    """Return the URL of an engine's server in the form by which the server is known: host in lower case, no `/v1` and
    no slash at the end. Return a text that is no URL as it is."""
    if not is_http_url(text):
        return text
    parts = urlsplit(text.rstrip("/").removesuffix("/v1").rstrip("/"))
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}{host.lower()}").geturl()
