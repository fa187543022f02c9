"""Decides to which addresses callbacks go.

A client of the server chooses the URL, and the server reaches more than that client does: the ports of its own
machine, and the metadata service of a cloud, which has a link-local address.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import AddrInfoType

from polar_gym.http.lookups import Lookups


@dataclass(frozen=True, slots=True)
class CallbackAddresses:
    """The addresses that callbacks may go to: neither link-local nor unspecified ones, and loopback only if allowed."""

    loopback: bool
    """True where the server listens on loopback: then its clients are on this machine."""
    lookups: Lookups

    def refuse(self, address: str) -> str:
        """Return why no callback goes to an IP address; "" for an address that callbacks may go to."""
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_link_local or ip.is_unspecified:
            return f"{address} is link-local or unspecified; name a host of your network"
        if ip.is_loopback and not self.loopback:
            return f"{address} is loopback, and the server listens on more than that; name the machine's own address"
        return ""

    async def refuse_url(self, url: str) -> str:
        """Return why no callback goes to a URL; "" for a name that does not resolve now, as `connect` checks again."""
        try:
            found = await self.lookups.find(urlsplit(url).hostname)
        except (OSError, UnicodeError):
            return ""
        return next(filter(None, (self.refuse(str(address[0])) for *_, address in found)), "")

    def connect(self, info: AddrInfoType) -> socket.socket:
        """Return a new socket for a connection to an address. Raise `OSError` where no callback goes there."""
        family, kind, protocol, _, address = info
        if problem := self.refuse(str(address[0])):
            raise OSError(problem)
        return socket.socket(family, kind, protocol)
