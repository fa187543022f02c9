"""Which requests a web page may have sent: one that is shown on this machine reaches every port of its loopback.

A browser says which page a request is from (`Origin`), except where it takes the page's own site for the port's: then
the request's `Host` is a name that was bound to this address a moment ago (DNS rebinding). Where a key is asked for,
no page has it.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

from polar_gym.http.keys import is_loopback

REFUSED = "a web page may have sent this: it has an Origin, or a Host that is not the port's own address, name or url"


def from_a_page(request: web.BaseRequest, urls: Collection[str | None] = ()) -> bool:
    """Return whether a web page may have sent a request: it has an Origin, or its Host is neither a loopback name, nor
    the address that the request came to, nor the host of one of `urls`, by which the port is known."""
    if "Origin" in request.headers:
        return True
    host = _host(f"//{request.headers.get('Host', '')}")
    if is_loopback(host) or host in {_host(url) for url in urls if url is not None}:
        return False
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return not (isinstance(address, tuple) and host == address[0])


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
