"""Runs agentcore-rl-toolkit's gateway for a benchmark. `benchmarks.peers` starts this with that package's Python.

Its history is linear: the gateway renders with the tokenizer, and sends the ids already served to the engine. Tokenizer
and template are files, because a model directory would need a download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agentcore_rl_toolkit.rollout_gateway.gateway import RolloutGateway  # pyright: ignore[reportMissingImports]
from agentcore_rl_toolkit.rollout_gateway.render import HfTemplateRenderer  # pyright: ignore[reportMissingImports]
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import (  # pyright: ignore[reportMissingImports]
    VllmHttpBackend,
)
from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    arguments = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(arguments.tokenizer))
    tokenizer.chat_template = arguments.template.read_text()
    gateway = RolloutGateway(
        backend=VllmHttpBackend(arguments.engine),
        renderer=HfTemplateRenderer(tokenizer),
        tokenizer=tokenizer,
        adapters=["openai"],
        history_mode="linear",
        linear_on_nonlinear="error",  # not "reset", which renders the whole history anew
    )
    for number in range(arguments.sessions):
        gateway.create_session(f"s{number}")
    gateway.run(host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
