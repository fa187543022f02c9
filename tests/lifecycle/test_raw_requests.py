"""Compressed bodies and malformed heads on the three ports: nothing is inflated, and no log has a key."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import http_parser

from tests.lifecycle.nodes import KEY, node_here, session_on_node
from tests.lifecycle.service_fixtures import SERVICE_KEY, rollout_server

PORTS = ("server", "node", "proxy")


@asynccontextmanager
async def port(name: str, directory: Path) -> AsyncIterator[tuple[str, str, str]]:
    """Give the method and URL of a request that has a body, and its key."""
    if name == "server":
        async with rollout_server(directory) as (_, client):
            yield "POST", f"{client.url}/v1/tasks", SERVICE_KEY
    elif name == "node":
        async with node_here(directory) as (gateway, _):
            yield "PUT", f"{gateway.url}/v1/sessions/s/0", KEY
    else:
        async with session_on_node(directory) as (node, capture):
            yield "POST", f"{node.url}/v1/chat/completions", capture.key


BOMB = zlib.compress(bytes(2**26), 9)
"""64 MiB in 65 kB."""


@pytest.fixture
def inflated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that aiohttp inflates from now on."""
    sizes: list[int] = []
    inflate = http_parser.DeflateBuffer.feed_data

    def watched(self: http_parser.DeflateBuffer, chunk: bytes, size: int) -> bool:
        sizes.append(size)
        return inflate(self, chunk, size)

    monkeypatch.setattr(http_parser.DeflateBuffer, "feed_data", watched)
    return sizes


@pytest.mark.parametrize("name", PORTS)
async def test_a_compressed_body_is_refused_and_never_inflated(tmp_path: Path, name: str, inflated: list[int]) -> None:
    """Guards against 300 kB that stall a port for many seconds, sent by a client that has no key."""
    async with port(name, tmp_path) as (method, url, key), aiohttp.ClientSession() as http:
        for given, expected in (("wrong", 401), (key, 415)):
            for encoding in ("deflate", "gzip", "br", "zstd"):
                headers = {"Content-Encoding": encoding, "Authorization": f"Bearer {given}"}
                async with http.request(method, url, data=BOMB, headers=headers) as response:
                    said = await response.text()
                    assert response.status == expected, said
                    assert inflated == []
        assert "Content-Encoding: zstd: compressed bodies are refused" in said


@pytest.mark.parametrize("name", PORTS)
async def test_a_malformed_head_leaves_no_key_in_the_log(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with port(name, tmp_path) as (method, url, _):
        place, _, path = url.removeprefix("http://").partition("/")
        host, _, number = place.partition(":")
        for line in (
            "Authorization: Bearer sesame-sesame\x01",
            "Authorization sesame-sesame",
            "x-api-key\x00: sesame-",
        ):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(f"{method} /{path} HTTP/1.1\r\nHost: {host}\r\n{line}\r\n\r\n".encode())
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 60), line
            writer.close()
        for start in ("POST /v1/tasks?key=sesame-\x01 HTTP/1.1", "sesame-sesame"):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(f"{start}\r\n\r\n".encode())
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 60), start
            writer.close()
    assert "sesame" not in caplog.text
    assert "Error handling request from 127.0.0.1" in caplog.text, "the refusal itself is in the log"
