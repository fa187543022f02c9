"""The gateway under measurement: a node with an engine behind a URL, and open sessions without a harness.

`python -m benchmarks.gateway_process --engine URL --state DIR` prints its port and the keys of its sessions, in one
JSON line. Node, proxy, capture and journal are the product's. Only the sandboxes are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import signal
from pathlib import Path

import orjson

from polar_gym.engines.vllm import ENGINE, VllmOptions
from polar_gym.gateway.node.node import Node
from polar_gym.schema import HarnessSpec, RuntimeSpec, TaskRequest


async def serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    node = Node(
        ENGINE(VllmOptions(url=arguments.engine)),
        cache=arguments.state / "cache",
        state=arguments.state / "state",
        splice=arguments.splice,
        streaming=arguments.streaming,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(node)
        keys = []
        for index in range(arguments.sessions):
            life = await stack.enter_async_context(node.session(_request(index)))
            life.capture.running = True
            keys.append(life.capture.key)
        print(orjson.dumps({"port": int(node.url.rpartition(":")[2]), "keys": keys}).decode(), flush=True)
        with cProfile.Profile() if arguments.profile else contextlib.nullcontext() as profile:
            await stop.wait()
        if profile is not None:
            profile.dump_stats(arguments.profile)


def _request(index: int) -> TaskRequest:
    return TaskRequest(
        task_id=f"benchmark{index}",
        instruction="x",
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec(name="pi"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--splice", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--streaming", choices=["synthetic", "real"], default="synthetic")
    parser.add_argument("--profile", type=Path, help="where cProfile's figures are written at the end")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
