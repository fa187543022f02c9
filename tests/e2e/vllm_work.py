"""What a vLLM is at work on, and an engine whose answers give it much to do."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from typing import Any

from polar_gym.inference import ChatRequest
from polar_gym.inference.vllm import VllmEngine
from polar_gym.schema import Message

LONG_MESSAGE: Message = {"role": "user", "content": "hi hi" * 11_000}
"""About 22,000 tokens of attention for each one sampled. vLLM's event loop takes results for as long as there are any,
and hears nothing else meanwhile: on a busy machine a model as tiny as ours would keep it at that for many seconds."""
ENDLESS = 10_000
"""An `EndlessEngine` samples more tokens than this to answer `LONG_MESSAGE`, unless it is stopped."""


class EndlessEngine(VllmEngine):
    """Answers are as long as they may be: a random model could end one at any token. They have no seed: vLLM on a CPU
    dies of a seeded request that it prefills again in several pieces, as it may after an update of its weights."""

    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        return super()._chat_body(request, fields) | {"ignore_eos": True, "seed": None}


def running_requests(url: str) -> float:
    return _metric(url, "vllm:num_requests_running")


def sampled_tokens(url: str) -> float:
    """Since the server was started."""
    return _metric(url, "vllm:generation_tokens_total")


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(name + "{"))
    return float(value)


def wait_until(happened: Callable[[], bool], within_seconds: float = 120) -> None:
    """Another process has no event to wait for. Blocks."""
    deadline = time.monotonic() + within_seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing of it within {within_seconds} s"
        time.sleep(0.05)
