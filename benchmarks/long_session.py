"""Measures a session of 100 turns and 100k tokens: the cost of each call to the gateway, and the size of its journal.

`python benchmarks/long_session.py` drives the parser, the conversation tree and the journal with growing Chat
Completions requests, without an engine. Each tenth call is measured beside the first call of a fresh session with the
same request. The ratio is the cost of a session's age, beyond the bytes of the request.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar_gym.chat import ids
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.providers import openai_chat
from polar_gym.schema import ModelCall
from polar_gym.splicing.plan import SessionMemory, Splicer
from polar_gym.splicing.terms import Terms

TURNS, TOKENS_A_TURN, SAMPLED = 100, 900, 100


class NoEngine:
    """A stand-in for an engine. Splicing is off: only the tree and the journal are measured."""


class Gateway:
    """The gateway's work on one session's requests, without the engine."""

    def __init__(self, directory: Path) -> None:
        self.journal = Journal(directory / "session.jsonl")
        self.splicer = Splicer(NoEngine(), enabled=False)  # pyright: ignore[reportArgumentType]
        self.terms = Terms(NoEngine())  # pyright: ignore[reportArgumentType]
        self.memory = SessionMemory()

    def take(self, body: bytes, turn: int, prompt: np.ndarray) -> tuple[ModelCall, float]:
        """Return the recorded call, and the CPU seconds that the call took."""
        started = time.process_time()
        request = openai_chat.parse(orjson.loads(body))
        asked = self.terms.of(self.memory.engine_ids, request)
        plan = asyncio.run(self.splicer.prepare(self.memory, request, asked))
        call = _call(turn, asked.messages, prompt, plan.parent_id)
        self.journal.append(call)
        self.memory.remember(call, plan)
        return call, time.process_time() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        gateway = Gateway(Path(directory))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
        prompt = np.arange(500, dtype=np.int32)
        print("turn  request kB     ms  fresh session ms  ratio  journal kB")
        stored = []
        for turn in range(1, TURNS + 1):
            body = orjson.dumps({"model": "policy", "messages": messages})
            call, seconds = gateway.take(body, turn, prompt)
            stored.append(gateway.journal.path.stat().st_size)
            if turn % 10 == 0:
                fresh = float(np.median([_fresh(body, turn, prompt) for _ in range(9)]))
                ratio, kilobytes = seconds / fresh, stored[-1] / 1e3
                cost = f"{seconds * 1e3:6.2f} {fresh * 1e3:17.2f} {ratio:6.2f}"
                print(f"{turn:4} {len(body) / 1e3:11.0f} {cost} {kilobytes:11.0f}")
            messages += _next_turn(call)
            prompt = np.concatenate([prompt, call.response_ids, np.arange(TOKENS_A_TURN, dtype=np.int32)])
        growth = np.polyfit(np.log(np.arange(10, TURNS + 1)), np.log(stored[9:]), 1)[0]
        print(f"{len(prompt)} tokens; the journal grows as turns^{growth:.2f}")


def _fresh(body: bytes, turn: int, prompt: np.ndarray) -> float:
    with tempfile.TemporaryDirectory() as directory:
        return Gateway(Path(directory)).take(body, turn, prompt)[1]


def _call(turn: int, messages: list[Any], prompt: np.ndarray, parent_id: str | None) -> ModelCall:
    tool_call = {"id": f"own-{turn}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return ModelCall(
        call_id=f"call{turn}",
        session_id="benchmark",
        index=turn,
        provider="openai_chat",
        model="policy",
        messages=messages,
        response={"role": "assistant", "content": "I look.", "tool_calls": [tool_call]},
        prompt_ids=prompt,
        response_ids=np.arange(SAMPLED, dtype=np.int32),
        logprobs=np.zeros(SAMPLED, np.float32),
        parent_id=parent_id,
        started_at=0.0,
        duration=0.0,
    )


def _next_turn(call: ModelCall) -> list[dict[str, Any]]:
    assert call.response is not None
    minted = ids.tool_call(call.call_id, 0)
    turn = {**call.response, "tool_calls": [{**call.response["tool_calls"][0], "id": minted}]}
    return [turn, {"role": "tool", "tool_call_id": minted, "content": "x" * 4 * TOKENS_A_TURN}]


if __name__ == "__main__":
    main()
