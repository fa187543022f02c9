"""A node is fit for many sessions at once: it finds their plug-ins in threads, and may open their files."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.open_files import WANTED
from polar_gym.registry import Options
from polar_gym.runtimes import processes
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


LIMITED = """
import asyncio, pathlib, resource, sys
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.node import Node
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
async def main():
    async with Node(EmbeddedEngine(EmbeddedOptions()), cache=pathlib.Path(sys.argv[1])):
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
asyncio.run(main())
"""


def test_a_node_may_open_the_files_of_many_sessions(tmp_path: Path) -> None:
    """Guards against sessions without a reward ("Too many open files"): 64 at once need a thousand files, and more with
    a model on a GPU in the process, where a usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) == (WANTED if most == resource.RLIM_INFINITY else min(WANTED, most))


CLEAN = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
"""What systemd-tmpfiles does before it removes old files of a directory."""


async def test_the_files_of_a_node_do_not_age(tmp_path: Path) -> None:
    """Guards against repositories in /tmp that lost file after file when their node was ten days old."""
    async with Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache", scratch=tmp_path):
        (scratch,) = tmp_path.glob("polar-gym-*")
        _, _, said = await processes.run([sys.executable, "-c", CLEAN, str(scratch)])
    assert b"BlockingIOError" in said
    assert not scratch.exists()
