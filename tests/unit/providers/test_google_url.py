"""What Google's wire says outside of a body: the URL, the key, and errors."""

from __future__ import annotations

import pytest

from polar_gym.providers.google import PROVIDER


@pytest.mark.parametrize(
    ("path", "operation", "name", "stream"),
    [
        ("/v1beta/models/m:generateContent", "chat", "m", None),
        ("/s/k/v1/models/a/b:latest:streamGenerateContent", "chat", "a/b:latest", "stream"),
        ("/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent", "chat", "m", None),
        ("/v1beta1/publishers/google/models/m:countTokens", "count_tokens", "m", None),
        ("/v1beta/models/m:embedContent", None, None, None),
        ("/v1beta/cachedContents", None, None, None),
    ],
)
def test_the_url_names_operation_and_model(path: str, operation: str | None, name: str | None, stream: str | None):
    found = [route for route in PROVIDER.routes if route.matches("POST", path, {})]
    assert [route.operation for route in found] == ([operation] if operation else [])
    for route in found:
        said = route.said(path, {"alt": "sse", "key": "k"})
        assert (said["model"], said.get("stream"), said.get("alt", "sse"), "key" in said) == (
            name,
            stream,
            "sse",
            False,
        )


@pytest.mark.parametrize(
    ("path", "headers", "found"),
    [
        ("/v1beta/models", {}, True),
        ("/v1/models", {"X-Goog-Api-Key": "k"}, True),
        ("/v1/models", {"Authorization": "Bearer k"}, False),
    ],
)
def test_the_listing_of_models(path: str, headers: dict[str, str], found: bool):
    assert any(route.matches("GET", path, headers) for route in PROVIDER.routes) is found


@pytest.mark.parametrize(
    ("headers", "key"),
    [({"X-Goog-Api-Key": "k"}, "k"), ({"Authorization": "Bearer k"}, "k"), ({"x-api-key": "k"}, None)],
)
def test_the_session_key(headers: dict[str, str], key: str | None):
    assert PROVIDER.session_key(headers) == key
    assert PROVIDER.key_parameter == "key"


@pytest.mark.parametrize(
    ("status", "kind", "name"),
    [
        (400, "invalid_request", "INVALID_ARGUMENT"),
        (400, "missing_required_parameter", "INVALID_ARGUMENT"),
        (401, "authentication", "UNAUTHENTICATED"),
        (403, "permission", "PERMISSION_DENIED"),
        (404, "not_found", "NOT_FOUND"),
        (429, "overloaded", "RESOURCE_EXHAUSTED"),
        (503, "overloaded", "UNAVAILABLE"),
        (502, "server", "INTERNAL"),
    ],
)
def test_errors(status: int, kind: str, name: str):
    assert PROVIDER.error(status, kind, "why") == {"error": {"code": status, "message": "why", "status": name}}


@pytest.mark.parametrize(
    ("engine_says", "google_says"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens",
            "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
        ),
        (
            "This model's maximum context length is 64 tokens. However, you requested 8 output tokens and your prompt "
            "contains at least 65 input tokens, for a total of at least 73 tokens.",
            "The input token count (65) exceeds the maximum number of tokens allowed (64).",
        ),
        ("too long", "The input token count exceeds the maximum number of tokens allowed. too long"),
    ],
)
def test_a_prompt_that_is_too_long_in_googles_words(engine_says: str, google_says: str):
    assert PROVIDER.error(400, "context_length", engine_says)["error"]["message"] == google_says
