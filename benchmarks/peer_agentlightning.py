"""Runs agent-lightning's LLM proxy for a benchmark. `benchmarks.peers` starts this with that package's Python.

The proxy runs in one process, with its store in memory. Its paths name a rollout and an attempt: all calls belong to
the attempt whose name is printed.
"""

from __future__ import annotations

import argparse
import asyncio

from agentlightning.llm_proxy import LLMProxy  # pyright: ignore[reportMissingImports]
from agentlightning.store.memory import InMemoryLightningStore  # pyright: ignore[reportMissingImports]
from agentlightning.utils.server_launcher import PythonServerLauncherArgs  # pyright: ignore[reportMissingImports]


async def serve(engine: str, port: int) -> None:
    model = {
        "model_name": "policy",
        "litellm_params": {"model": "hosted_vllm/policy", "api_base": f"{engine}/v1", "api_key": "none"},
    }
    store = InMemoryLightningStore()
    rollout = await store.start_rollout(input={})
    launcher = PythonServerLauncherArgs(port=port, host="127.0.0.1", launch_mode="asyncio", startup_timeout=60.0)
    proxy = LLMProxy(model_list=[model], store=store, launcher_args=launcher)
    await proxy.start()
    print(f"session: {rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.engine, arguments.port))


if __name__ == "__main__":
    main()
