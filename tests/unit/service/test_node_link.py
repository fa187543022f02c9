"""Orders from the server to nodes."""

from __future__ import annotations

import pytest

from polar_gym.protocol import Generation
from polar_gym.service.node_link import NodeLink, NodeUnreachableError


@pytest.mark.parametrize("host", ["gpu..example", "a" * 64])
async def test_a_node_whose_host_is_no_name_cannot_be_reached(host: str) -> None:
    """Guards against a server that one node's heartbeat with such a URL ends, and ends again after each restart: the
    codec of names raises an error that is neither aiohttp's nor the system's."""
    async with NodeLink(None) as link:
        with pytest.raises(NodeUnreachableError, match=host):
            await link.generation(f"http://{host}:8701", Generation())
