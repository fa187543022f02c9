"""Which texts are URLs that we can ask."""

from __future__ import annotations

import pytest

from polar_gym.http.urls import is_http_url


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/v1", "http://[::1]:8000/", "HTTP://host"])
def test_a_url_with_a_host_is_taken(url: str) -> None:
    assert is_http_url(url)


@pytest.mark.parametrize(
    "text", ["", "foo", "host:8000", "http:/host", "http:///v1", "http://:80", "ftp://h", "http://["]
)
def test_any_other_text_is_not(text: str) -> None:
    assert not is_http_url(text)
