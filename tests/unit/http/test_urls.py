"""Which texts are URLs that we can ask."""

from __future__ import annotations

import pytest

from polar_gym.http.urls import engine_url, is_http_url


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/v1", "http://[::1]:8000/", "HTTP://host"])
def test_a_url_with_a_host_is_taken(url: str) -> None:
    assert is_http_url(url)


@pytest.mark.parametrize(
    "text",
    [
        *("", "foo", "host:8000", "http:/host", "http:///v1", "http://:80", "ftp://h", "http://["),
        *("http://a..b", f"http://{'a' * 64}"),
    ],
)
def test_any_other_text_is_not(text: str) -> None:
    assert not is_http_url(text)


@pytest.mark.parametrize("text", ["http://a:8000", "http://a:8000/", "http://A:8000/v1", "HTTP://a:8000/v1/"])
def test_an_engine_has_one_url(text: str) -> None:
    assert engine_url(text) == "http://a:8000"


@pytest.mark.parametrize("text", ["http://user:Pass@a/v2", "http://[::1]:8000/Path", "a:8000/", ""])
def test_the_other_parts_of_a_url_stay(text: str) -> None:
    assert engine_url(text) == text
