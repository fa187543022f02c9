"""A server with vLLM's API that answers at a GPU's pace: `python -m benchmarks.gpu_engine`, for `real_engine`.

It is the mock engine, but each token of a stream takes a step of a decoder: plain torch, bf16, random weights in the
shape of Llama 3 8B, one step for all streams at once, and for each stream the keys and values of 8,192 tokens. The
tokens are those of the mock engine. No prompt is computed: the first token takes one step, too, as if all of the prompt
were in a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.mock_engine import long_answer, serve

WIDTH, LAYERS, HEADS, KEYS, HEAD, INNER, VOCABULARY = 4096, 32, 32, 8, 128, 14_336, 128_256
BATCHES = (1, 8, 32)
"""The numbers of streams for which a step is recorded as a CUDA graph. A step has the next larger one."""


class Decoder:
    """One step of a model for a number of streams."""

    def __init__(self, context: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        shapes = [(WIDTH, (HEADS + 2 * KEYS) * HEAD), (HEADS * HEAD, WIDTH), (WIDTH, 2 * INNER), (INNER, WIDTH)]
        self._layers = [[self._random(shape) for shape in shapes] for _ in range(LAYERS)]
        self._caches = [[self._random((BATCHES[-1], KEYS, context, HEAD)) for _ in range(2)] for _ in range(LAYERS)]
        self._head = self._random((WIDTH, VOCABULARY))
        self._graphs = {batch: self._recorded(batch) for batch in BATCHES}

    def step(self, streams: int) -> None:
        """Run a step, and return when the GPU has ended it."""
        self._graphs[next(batch for batch in BATCHES if batch >= streams)].replay()
        self._torch.cuda.synchronize()

    def _random(self, shape: tuple[int, ...]) -> Any:
        return self._torch.randn(shape, dtype=self._torch.bfloat16, device="cuda") * 0.02

    def _recorded(self, batch: int) -> Any:
        hidden = self._random((batch, WIDTH))
        for _ in range(2):  # kernels are chosen before a graph is recorded
            self._run(hidden)
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            self._run(hidden)
        return graph

    def _run(self, hidden: Any) -> Any:
        torch, batch = self._torch, len(hidden)
        functional = torch.nn.functional
        with torch.inference_mode():
            for (qkv, out, up, down), (keys, values) in zip(self._layers, self._caches, strict=True):
                queries = (functional.rms_norm(hidden, (WIDTH,)) @ qkv)[:, : HEADS * HEAD].view(batch, HEADS, 1, HEAD)
                seen = functional.scaled_dot_product_attention(queries, keys[:batch], values[:batch], enable_gqa=True)
                hidden = hidden + seen.reshape(batch, -1) @ out
                gate, inner = (functional.rms_norm(hidden, (WIDTH,)) @ up).chunk(2, dim=-1)
                hidden = hidden + (functional.silu(gate) * inner) @ down
            return (functional.rms_norm(hidden, (WIDTH,)) @ self._head).float().log_softmax(-1).argmax(-1)


class Steps:
    """Runs steps in a thread of its own, each for all streams."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._loop = decoder, asyncio.get_running_loop()
        self._streams: list[tuple[int, Callable[[], None]]] = []
        """For each stream: how many steps its next event takes, and the function that sends the event."""
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def later(self, send: Callable[[], None], tokens: int) -> None:
        """Call `send` after as many steps as the event has tokens."""
        with self._changed:
            self._streams.append((max(1, tokens), send))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._streams)
                running, self._streams = self._streams[: BATCHES[-1]], self._streams[BATCHES[-1] :]
            self._decoder.step(len(running))
            due = [send for left, send in running if left == 1]
            with self._changed:
                self._streams = [(left - 1, send) for left, send in running if left > 1] + self._streams
            if due:
                sent = threading.Event()
                self._loop.call_soon_threadsafe(self._send, due, sent)
                sent.wait()  # the next step is for these, too

    def _send(self, due: list[Callable[[], None]], sent: threading.Event) -> None:
        for send in due:
            send()
        sent.set()


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer-tokens", type=int, default=340)
    parser.add_argument("--context", type=int, default=8192, help="tokens that a stream attends to (%(default)s)")
    arguments = parser.parse_args()
    await serve(long_answer(arguments.answer_tokens), Steps(Decoder(arguments.context)).later)


if __name__ == "__main__":
    asyncio.run(main())
