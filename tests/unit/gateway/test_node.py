"""A node finds the plug-ins of many requests at once, each in a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.node import Node
from polar_gym.registry import Options
from polar_gym.schema import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskRequest

THREADS = 4


class SlowRuntime:
    """A runtime whose making takes until all threads make one."""

    Options = Options
    together = threading.Barrier(THREADS)

    def __init__(self, options: Options) -> None:
        self.together.wait(timeout=60)


def test_sessions_that_arrive_together_share_one_runtime(tmp_path: Path) -> None:
    """Guards against a runtime that the node forgets, and so never closes."""
    request = TaskRequest(
        task_id="t",
        instruction="x",
        runtime=RuntimeSpec(name=f"{__name__}:SlowRuntime"),
        agent=HarnessSpec(name="pi"),
        evaluator=EvaluatorSpec(name="session_completion"),
    )
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path)
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(node.find_plugins, [request] * THREADS))
    assert {plugins.runtime for plugins in found} == {node.runtime(request.runtime)}
