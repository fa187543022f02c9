"""Runs the interception server of verifiers for a benchmark. `benchmarks.peers` starts this with that package's Python.

Without `--tokenizer` it relays requests to the engine, as in an evaluation. With a tokenizer and a template it renders
prompts itself, sends the ids already served to the engine, and asks that for ids, as in training.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from renderers.configs import Qwen3RendererConfig  # pyright: ignore[reportMissingImports]
from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients.client import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.interception.server import (  # pyright: ignore[reportMissingImports]
    InterceptionServer,
    InterceptionServerConfig,
)
from verifiers.v1.interception.tunnel import CustomTunnelConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.session import RolloutSession  # pyright: ignore[reportMissingImports]
from verifiers.v1.task import TaskData  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]


def config_of(arguments: argparse.Namespace, folder: Path) -> Any:
    """Return how the server asks the engine."""
    if arguments.tokenizer is None:
        return EvalClientConfig(base_url=f"{arguments.engine}/v1", api_key_var="NO_KEY")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(arguments.tokenizer), eos_token="<|im_end|>")
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"])  # the renderer asks for them
    tokenizer.chat_template = arguments.template.read_text()
    tokenizer.save_pretrained(folder)
    return TrainClientConfig(
        base_url=f"{arguments.engine}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(folder),
    )


async def serve(arguments: argparse.Namespace, folder: Path) -> None:
    context = ModelContext(model="policy", client=config_of(arguments, folder))
    tunnel = CustomTunnelConfig(url=f"http://127.0.0.1:{arguments.port}", port=arguments.port)
    async with InterceptionServer(InterceptionServerConfig(tunnel=tunnel), requires_tunnel=True) as server:
        for number in range(arguments.sessions):
            task = TraceTask(type="Task", data=TaskData(idx=number))
            trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
            secret, _ = server.register(RolloutSession(ctx=context, trace=trace))
            server.sessions[f"s{number}"] = server.sessions.pop(secret)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--template", type=Path)
    parser.add_argument("--sessions", type=int, required=True)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
