"""New weights for a vLLM that runs, by the routes of a server in development mode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson

from polar_gym.engines import EngineError
from polar_gym.engines.http import Http


@asynccontextmanager
async def paused(http: Http) -> AsyncIterator[None]:
    """Have vLLM hold its calls until the context ends. Raises `EngineError`."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(http.post_raw, "/resume", {})  # a pause whose answer is lost may hold all the same
        try:
            await http.post_raw("/pause?mode=keep", {}, long=True)
        except EngineError as error:
            if error.status != 404:
                raise
            stack.pop_all()
            problem = f"{http.url} has no routes for new weights; start vLLM with VLLM_SERVER_DEV_MODE=1"
            raise EngineError(400, problem) from error
        yield


async def reload(http: Http, directory: Path, version: str) -> bool:
    """Have vLLM read a directory, and name the weights. Return whether vLLM says that it emptied its prefix caches.

    vLLM does not say whether it computes the keys and values of paused calls again: vLLM 0.32 on CPU does. Raises
    `EngineError`, also where vLLM has some of the weights, or all."""
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    await http.post_raw("/collective_rpc", order, long=True)
    said = await http.post_raw("/reset_prefix_cache?reset_external=true", {})
    await http.post_raw("/update_weight_version", {"new_version": version})
    return _says_success(said)


def _says_success(said: bytes) -> bool:
    """Return whether an answer has `success`; those of earlier versions are empty."""
    try:
        return orjson.loads(said).get("success") is True
    except (orjson.JSONDecodeError, AttributeError):
        return False
