"""Recognises requests that a web page may have sent: a page shown on this machine reaches all loopback ports.

The header `Origin` names the page that a request is from. A browser omits `Origin` where the page's own site seems to
be the port, because that site bound its name to this address a moment ago (DNS rebinding). Then `Host` holds that name.
A port that asks for a key needs no such guard, because no page has the key.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

from polar_gym.http.keys import is_loopback

REFUSED = "a web page may have sent this: it has an Origin, or a Host that is not the port's own address, name or url"


def from_a_page(request: web.BaseRequest, urls: Collection[str | None] = ()) -> bool:
    """Return whether a web page may have sent a request.

    Such a request has an Origin, or a Host of another kind than these: a loopback name, the address that the request
    came to, the host of one of the port's own `urls`.
    """
    if "Origin" in request.headers:
        return True
    host = _host(f"//{request.headers.get('Host', '')}")
    if is_loopback(host) or host in {_host(url) for url in urls if url is not None}:
        return False
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return not (isinstance(address, tuple) and host == address[0])


def _host(url: str) -> str:
    """Return the host of a URL, and "" where a URL is malformed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
