"""What a wire that says things in its URL asks of the gateway: the model's name, whether to stream, and the key."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.support.sessions import listing_engine, running_session

GO = {"contents": [{"parts": [{"text": "go"}]}]}


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent"])
async def test_the_url_names_model_and_key(tmp_path: Path, method: str) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), aiohttp.ClientSession() as http:
        url = f"{node.url}/v1beta/models/gemini-3-flash:{method}"
        async with http.post(url, params={"key": capture.key, "alt": "sse"}, json=GO) as response:
            assert response.status == 200
            assert capture.calls[0].call_id in await response.text()
            assert response.content_type == {"g": "application/json", "s": "text/event-stream"}[method[0]]
        (call,) = capture.calls
        assert (call.provider, call.model) == ("google", "gemini-3-flash")
        async with http.post(url, params={"key": "pg-nobody", "alt": "sse"}, json=GO) as response:
            assert (await response.json())["error"]["status"] == "UNAUTHENTICATED"


async def test_counting_is_no_call_and_refusals_have_googles_shape(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), aiohttp.ClientSession() as http:
        headers = {"x-goog-api-key": capture.key}
        base = f"{node.url}/v1beta/models/m"
        for body in (GO, {"generateContentRequest": {"model": "models/m", **GO}}):
            async with http.post(f"{base}:countTokens", headers=headers, json=body) as response:
                assert (await response.json())["totalTokens"] > 0
        for path, status in ((":generateContent", 400), (":embedContent", 404)):
            async with http.post(f"{base}{path}", headers=headers, json={}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (status, status)
        async with http.get(f"{node.url}/v1beta/models", headers=headers) as response:
            assert (await response.json())["models"][0]["name"] == f"models/{capture.model_name}"
        assert capture.calls == []
