"""Reads what a gateway keeps of a session: its journal and its episode. The formats are read here from their text."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CUT_OFF = ("abandoned", "failed")


@dataclass(slots=True)
class Call:
    """One call of a journal."""

    call_id: str
    session_id: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    outcome: str
    mismatch: list[str]
    line: dict[str, Any]
    """The journal's line, with its histories put together."""


@dataclass(slots=True)
class Trace:
    """One trace of an episode."""

    trace_id: str
    session_id: str
    prompt: list[int]
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    call_ids: list[str]
    line: dict[str, Any]


@dataclass(slots=True)
class Books:
    """One session's journal and episode."""

    session_id: str
    calls: list[Call]
    traces: list[Trace] = field(default_factory=list)
    fidelity: dict[str, Any] = field(default_factory=dict)


def read_books(journal: Path, episode: dict[str, Any] | None) -> Books:
    """Return a session's books. `episode` is the parsed JSON of the episode; None: the session has none."""
    calls = read_calls(journal)
    if episode is None:
        return Books(session_id=calls[0].session_id if calls else journal.parent.name, calls=calls)
    trajectory = episode["trajectory"]
    return Books(
        session_id=episode["session"]["session_id"],
        calls=calls,
        traces=[_trace(line) for line in trajectory["traces"]],
        fidelity=trajectory["fidelity"],
    )


def read_calls(journal: Path) -> list[Call]:
    """Return the calls of a journal. A last line without an end was never finished, and does not count."""
    if not journal.exists():
        return []
    lines: dict[str, dict[str, Any]] = {}
    whole = journal.read_bytes().split(b"\n")[:-1]
    for text in whole:
        line = json.loads(text)
        if "amend" in line:
            amended = lines[line.pop("amend")]
            for name in ("response_ids", "logprobs"):
                amended[name] = amended[name] + line.pop(name, [])
            amended.update(line)
        elif "call_id" in line:
            lines[line["call_id"]] = _put_together(line, list(lines.values()))
        else:
            raise ValueError(f"{journal}: a line with the keys {sorted(line)} is unknown to the auditor")
    return [_call(line) for line in lines.values()]


def _put_together(line: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    made = dict(line)
    for name in ("messages", "tools", "prompt_ids"):
        part, kept = line[name], []
        if part["from"] is not None:
            base = earlier[part["from"]]
            kept = base[name] + (base["response_ids"] if name == "prompt_ids" else [])
        made[name] = kept[: part["keep"]] + part["new"]
    return made


def _call(line: dict[str, Any]) -> Call:
    return Call(
        call_id=line["call_id"],
        session_id=line["session_id"],
        prompt=line["prompt_ids"],
        ids=line["response_ids"],
        logprobs=line["logprobs"],
        outcome=line["outcome"],
        mismatch=line["sampling_mismatch"],
        line=line,
    )


def _trace(line: dict[str, Any]) -> Trace:
    return Trace(
        trace_id=line["trace_id"],
        session_id=line["session_id"],
        prompt=line["prompt_ids"],
        ids=line["response_ids"],
        mask=line["loss_mask"],
        logprobs=line["logprobs"],
        call_ids=line["call_ids"],
        line=line,
    )


def same_logprob(one: float, other: float) -> bool:
    """Return whether two numbers are the same in float32, in which the gateway keeps them."""
    return struct.pack("f", one) == struct.pack("f", other)
