"""What a vLLM is at work on, and an engine whose answers give it much to do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.engines.vllm import VllmEngine
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


@contextlib.contextmanager
def slow_engine(url: str) -> Iterator[None]:
    """Stop vLLM's engine and its workers for most of the time, so that the server always has time for other requests.
    A worker whose engine is stopped would use a core for waiting."""
    engine = _engine_processes(url)
    with subprocess.Popen([sys.executable, "-c", _HOLD, *map(str, engine)], stdout=subprocess.PIPE) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"holding\n"
        try:
            yield
        finally:
            holding.kill()
            holding.wait()
            for process in engine:
                os.kill(process, signal.SIGCONT)


_HOLD = """
import contextlib, os, signal, sys, time
with contextlib.suppress(PermissionError):  # on time also where the machine is busy
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("holding", flush=True)
while True:
    for sign, seconds in ((signal.SIGSTOP, 0.1), (signal.SIGCONT, 0.01)):
        for process in sys.argv[1:]:
            os.kill(int(process), sign)
        time.sleep(seconds)
"""


def _engine_processes(url: str) -> list[int]:
    """Return the ids of the processes that sample for the server at this URL: the engine, then its workers."""
    port = f"\0{url.rpartition(':')[2]}\0".encode()
    servers = {each.parent.name for each in Path("/proc").glob("[0-9]*/cmdline") if port in _read(each)}
    (engine,) = (child for server in servers for child in _children(server, "VLLM::Engine"))
    return [int(engine), *map(int, _children(engine, "VLLM::Worker"))]


def _children(parent: str, name: str) -> list[str]:
    """Return the ids of a process's children whose names begin with `name`."""
    children = _read(Path("/proc") / parent / "task" / parent / "children").decode().split()
    return [child for child in children if _read(Path("/proc") / child / "comm").startswith(name.encode())]


def _read(path: Path) -> bytes:
    """Return the contents of a file in /proc; nothing where its process has ended."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


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


def wait_until(happened: Callable[[], bool], within_seconds: float = 600) -> None:
    """Another process has no event to wait for. Blocks."""
    deadline = time.monotonic() + within_seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing of it within {within_seconds} s"
        time.sleep(0.05)
