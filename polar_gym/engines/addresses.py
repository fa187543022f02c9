"""The addresses of a host that has several, each of which is a server."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit


async def addresses(url: str) -> list[str]:
    """Return the URL once for each address of its host, or as it is where the host has one address, or needs its name
    for a certificate."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return [url]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError:  # the server's first request raises the error that names the host
        return [url]
    first = min((family for family, *_ in found), key=lambda family: family != socket.AF_INET)
    hosts = dict.fromkeys(address[0] for family, *_, address in found if family == first)
    if len(hosts) < 2:
        return [url]
    port = "" if parts.port is None else f":{parts.port}"
    return [
        parts._replace(netloc=f"[{host}]{port}" if ":" in str(host) else f"{host}{port}").geturl() for host in hosts
    ]
