"""A run of made-up sessions with everything that a viewer shows: groups, forks, sub-agents, failures, journals.

Calls, traces and books are made by the real journal and builder; words, logprobs and rewards are drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polar_gym.builders import build_trajectory
from polar_gym.engines import embedded
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.schema import (
    Artifacts,
    BuilderSpec,
    EngineInfo,
    Episode,
    EvaluationResult,
    Failure,
    HarnessSpec,
    ModelCall,
    Replayed,
    RuntimeSpec,
    Session,
    Status,
    TaskRequest,
    Timing,
    ToolAttempt,
    ToolStatus,
    WeightVersion,
)
from tests.support.tools import BASH

TOKENIZER = Path(embedded.__file__).with_name("tokenizer.json")
DIFF = """diff --git a/intervals.py b/intervals.py
--- a/intervals.py
+++ b/intervals.py
@@ -10,7 +10,8 @@ class Intervals:
     def add(self, start, end):
-        if end < self.end:  # touching runs stay apart
+        # touching runs are one
+        if end <= self.end:
             return "merged"
"""
SAID = "the set joins runs that touch so a gap of one stays open when tests look at its length again"
WORDS = SAID.split()
SYSTEM = " ".join([SAID] * 3)
START = 1_790_000_000.0


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def ids_of(text: str) -> list[int]:
    return _tokenizer().encode(text, add_special_tokens=False).ids


class _Writer:
    """Writes the calls of one session."""

    def __init__(self, session_id: str, rng: random.Random, begun: float, length: int) -> None:
        self.session_id = session_id
        self.rng = rng
        self.record: str | None = None
        """The session that sampled the calls that are made now."""
        self.clock = begun
        self.length = length
        """Words of a tool's answer."""
        self.calls: list[ModelCall] = []

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    def call(self, messages: list[Any], parent: ModelCall | None = None, **fields: Any) -> ModelCall:
        """Record a call. Its prompt continues that of `parent`, or differs in the middle, with a `splice_cause`."""
        index = len(self.calls)
        new = messages if parent is None else messages[len(parent.messages) + 1 :]
        prompt = ids_of("".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in new))
        if parent is not None:
            known = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
            if "splice_cause" in fields:
                known[2 * len(known) // 3] = ids_of(" otherwise")[0]
            prompt = [*known, *prompt]
        command = {"command": f"python -m pytest -q tests/test_{self.rng.choice(WORDS)}.py"}
        tool = {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps(command)},
        }
        response = {"role": "assistant", "content": self.words(8), "reasoning": self.words(12), "tool_calls": [tool]}
        sampled = ids_of(f"{response['reasoning']}</think>{response['content']}<tool_call>{command}</tool_call>")
        logprobs = -np.random.default_rng(index).exponential(0.4, len(sampled)).astype(np.float32)
        duration = self.rng.lognormvariate(0.3, 0.8)
        half = len(sampled) // 2
        versions = [
            WeightVersion(version="step-3", start=0, end=half),
            WeightVersion(version="step-4", start=half, end=len(sampled)),
        ]
        values: dict[str, Any] = {
            "call_id": f"{self.session_id}-{index}",
            "session_id": self.session_id,
            "index": index,
            "provider": "openai_chat",
            "model": "policy",
            "messages": messages,
            "tools": [BASH],
            "response": response,
            "prompt_ids": np.array(prompt, np.int32),
            "response_ids": np.array(sampled, np.int32),
            "logprobs": logprobs,
            "finish_reason": "tool_calls",
            "parent_id": None if parent is None else parent.call_id,
            "continuation": "root" if parent is None else "canonical" if "splice_cause" in fields else "spliced",
            "weight_versions": versions,
            "started_at": self.clock,
            "duration": duration,
            "replayed": self.record and Replayed(session_id=self.record, owned=False),
        }
        made = ModelCall.model_validate(values | fields)
        self.clock += duration + 0.2
        self.calls.append(made)
        return made

    def thread(self, instruction: str, turns: int, **fields: Any) -> ModelCall:
        """Record a conversation of so many calls, and return the last one."""
        messages: list[Any] = [{"role": "system", "content": f"You are a coding agent.\n{SYSTEM}"}]
        messages.append({"role": "user", "content": instruction})
        last = self.call(messages, **fields)
        for _ in range(turns - 1):
            last = self.call(self.after(last), last, **fields)
        return last

    def after(self, call: ModelCall) -> list[Any]:
        answer = {"role": "tool", "tool_call_id": f"call_{call.index}", "content": self.words(self.length)}
        return [*call.messages, call.response, answer]


def made_session(task: int, sample: int, journals: Path | None, *, turns: int = 4, length: int = 60) -> Episode:
    """Return an episode. Sample 1 of a task forks, 2 has a sub-agent and an abandoned call, 3 a compaction, 4 fails;
    6 is branched from sample 0 after two calls."""
    branched = sample % 16 == 6
    rng = random.Random(1000 * task + sample - 6 * branched)
    session_id, task_id = f"s{task:04}x{sample:02}", f"intervals-{task:04}"
    begun = START + 9.0 * sample + task + 30 * (sample // 8)
    writer = _Writer(session_id, rng, begun, length)
    instruction = f"Task {task}: the set must join runs that touch."
    if branched:
        writer.record = f"s{task:04}x{sample - 6:02}"
        last = writer.thread(instruction, 2)
        writer.record, writer.rng = None, random.Random(1000 * task + sample)
        last = writer.call(writer.after(last), last)
    else:
        last = writer.thread(instruction, turns)
    if sample % 16 == 1:
        for cause in ("history", "engine", "off"):
            last = writer.call(writer.after(last), last, splice_cause=cause)
    elif sample % 16 == 2:
        writer.thread("Look for callers of `add`.", 2, hints={"kind": "subagent", "thread": "t1"})
        writer.call(writer.after(last), last, outcome="abandoned")
        last = writer.call(writer.after(last), last)
        writer.call([{"role": "user", "content": "A title for this?"}], hints={"kind": "auxiliary"})
    elif sample % 16 == 3:
        last = writer.call(writer.after(last), last, hints={"kind": "compaction"})
        last = writer.thread(f"{instruction}\nSo far: {writer.words(10)}", 2)
    trajectory = build_trajectory(writer.calls, BuilderSpec(name="prefix_merging"))
    outcomes: list[ToolStatus] = ["ok", "malformed", "unknown_tool"]
    statuses = rng.choices(outcomes, weights=[20, 1, 1], k=len(writer.calls))
    trajectory.tool_attempts = [
        ToolAttempt(call_id=call.call_id, status=status, name="bash")
        for call, status in zip(writer.calls, statuses, strict=True)
    ]
    failure = Failure(stage=Status.RUNNING, kind="engine_error", message="the engine is gone") if sample == 4 else None
    solved = rng.random() < (task % 5) / 4
    if journals is not None:
        journal = Journal(journals / f"{session_id}.jsonl")
        for call in writer.calls:
            journal.append(call)
        journal.close()
    tests = {f"tests.test_{word}": "PASSED" if solved or word != "gap" else "FAILED" for word in sorted(set(WORDS))}
    return Episode(
        session=Session(
            session_id=session_id,
            task_id=task_id,
            sample_index=sample,
            harness="pi",
            status=Status.ERROR if failure else Status.COMPLETED,
            failure=failure,
            truncated_by="time" if sample == 5 else None,
            node="local",
            weight_version="step-3",
            staleness=sample % 3,
            timing=Timing(
                queued=0.5, init=2.0, ready=0.3, running=writer.clock - begun, building=0.2, evaluating=3 + rng.random()
            ),
        ),
        request=TaskRequest(
            task_id=task_id,
            instruction=instruction,
            num_samples=16,
            runtime=RuntimeSpec(name="bubblewrap"),
            agent=HarnessSpec(name="pi"),
        ),
        engine=EngineInfo(
            name="embedded", model="policy", scripted=True, max_model_len=65536, tokenizer=str(TOKENIZER)
        ),
        trajectory=trajectory,
        reward=None if failure else float(solved),
        evaluation=None
        if failure
        else EvaluationResult(
            evaluator="swe",
            reward=float(solved),
            resolved=solved,
            tests=tests,
            detail=f"all {len(tests)} tests passed" if solved else f"1 of {len(tests)} tests failed: tests.test_gap",
            log=f"{len(tests)} tests\n",
            trust="high",
        ),
        artifacts=Artifacts(
            final_message="Done.",
            diff=DIFF,
            stdout="it said this\n",
            stderr="\x1b[31mwarning\x1b[0m: slow\n",
            journal=None if journals is None else str(journals / f"{session_id}.jsonl"),
        ),
    )


def made_run(tasks: int, samples: int, journals: Path | None = None, **sizes: int) -> Iterator[Episode]:
    """Yield the sessions of a run."""
    for task in range(tasks):
        for sample in range(samples):
            yield made_session(task, sample, journals, **sizes)


def write_run(file: Path, episodes: Iterator[Episode]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as lines:
        for episode in episodes:
            lines.write(episode.to_json() + b"\n")
    return file
