# pyright: reportMissingImports=false
"""NeMo RL's vLLM worker with its HTTP server, on the CPU: `python -m tests.nemo_rl.vllm_worker MODEL FILE`.

Real: `_create_engine` and `_setup_vllm_server`, and with them NeMo RL's routes, and what a refit in flight calls. Only
the `__init__` that asks Ray for a GPU is skipped, and the weights come from the disk. NeMo RL pins vLLM 0.25.1; two
modules have moved in 0.32, which the tests have. The program writes the server's URL into the open file of the number
FILE, and serves until its input ends.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

import tests.nemo_rl  # noqa: F401 - before NeMo RL

MOVED = {
    "vllm.entrypoints.chat_utils": "vllm.renderers.chat_utils",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
}
"""The module that NeMo RL imports -> the same in vLLM 0.32."""
MAX_MODEL_LEN = 32_768


class FromDisk:
    """The part of vLLM's worker that NeMo RL adds for a refit."""

    def update_weights_from_collective(self: Any) -> bool:
        self.reload_weights()
        return True


def serve(model: str) -> str:
    """Return the URL of a server that has begun. `POST /refit` says how many requests a refit found and left."""
    for name, now in MOVED.items():
        with suppress(ModuleNotFoundError):  # of NeMo RL's own vLLM
            sys.modules[name] = importlib.import_module(now)
    module = importlib.import_module("nemo_rl.models.generation.vllm.vllm_worker_async")
    worker = object.__new__(module.VllmAsyncGenerationWorkerImpl)
    parsers = {"enable_auto_tools": True, "tool_parser": "hermes", "reasoning_parser": "qwen3"}
    own = {"async_engine": True, "expose_http_server": True, "http_server_serving_chat_kwargs": parsers}
    sampling = {"temperature": 1.0, "top_p": 1.0, "val_temperature": 0.6, "val_top_p": 0.95}
    worker.cfg = {"vllm_cfg": own, **sampling}
    worker._sparse_refit_receiver = worker._reserved_socket = None
    engine = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32", "enforce_eager": True}
    names = {"served_model_name": "policy", "worker_extension_cls": "tests.nemo_rl.vllm_worker.FromDisk"}
    worker._create_engine({"model": model, "logprobs_mode": "processed_logprobs", **names, **engine})

    @worker.http_server.config.app.post("/refit")
    async def refit() -> dict[str, int]:
        found = worker.llm.output_processor.get_num_unfinished_requests()
        assert await worker.update_weights_from_collective_async()
        await worker.reset_prefix_cache_async()
        return {"found": found, "left": worker.llm.output_processor.get_num_unfinished_requests()}

    return worker.base_url


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as told:
        told.write(serve(sys.argv[1]))
    sys.stdin.read()
