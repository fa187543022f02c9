"""The node's append-only record of captured calls: one file per session, one line per call.

A line is in the file when `write()` has returned, and then survives SIGKILL of the gateway. A call has a line when its
answer begins, one for each further piece of the answer, and one at the end, before the last byte of the answer leaves
for the harness. Histories are stored once: a line holds what its call adds to an earlier call, so that a session's file
grows with its length, not with its square.

A line is JSON: the call without `messages`, `tools` and `prompt_ids`. Each of these three is
`{"from": index of an earlier call | null, "keep": n, "new": [...]}`. It stands for the first `n` items of the earlier
call's list (of its prompt and response for `prompt_ids`), followed by the new items. A line
`{"amend": call_id, ...}` changes fields of a call written before. Its `response_ids` and `logprobs` come after the ones
that the call has.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import orjson
from pydantic import model_validator

from polar_gym.builders.fidelity import first_difference
from polar_gym.durable import json_lines
from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.shared_prompts import SharedPrompts
from polar_gym.record import Logprobs, Record, TokenIds
from polar_gym.schema import ModelCall

LOOK_BACK = 8
"""How many earlier calls are tried as the one to build on: parallel conversations interleave."""

ASKED = {
    *("call_id", "session_id", "index", "provider", "model", "messages", "tools", "prompt_ids", "hints", "started_at"),
    *("sampling_mismatch", "single_tool_call", "parent_id", "continuation", "splice_cause", "edited_answers", "frozen"),
}
"""The fields of a call that are known when its answer begins."""
SAMPLED = {"response_ids", "logprobs"}
"""The fields of a call that grow while its answer comes."""

RESERVE = 4 * 1024 * 1024
"""Bytes on the disk that each journal holds ready, for lines that come while the disk is full."""
STEP = 64 * 1024
"""How many of them are freed at once, at least: a file system frees whole blocks only."""


class JournalError(ConfigError):
    """A journal is damaged before its last line."""

    def __init__(self, message: str, calls: list[ModelCall]) -> None:
        super().__init__(message)
        self.calls = calls
        """The calls before the damage."""


class Journal:
    """Appends calls to a file. `close` syncs the file to the disk and closes it. Both raise `OSError`."""

    def __init__(self, path: Path) -> None:
        """Make the file. It is opened at the first call only, because thousands of sessions may be queued."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self.path = path
        self._file: int | None = None
        self._reserve: IO[bytes] | None = None
        """A file without a name, which takes up the space that is held ready."""
        self._closed = False
        self._calls: list[ModelCall] = []
        self._index: dict[str, int] = {}
        """Call id -> the call's place in `_calls`."""
        self._sampled: dict[str, int] = {}
        """Call id -> how many of the sampled tokens are in the file."""
        self._prompts = SharedPrompts()

    def append(self, call: ModelCall) -> None:
        """Write a call, or the rest of a call that was written when its answer began. Afterwards the call shares equal
        messages, tools and ids with the call that it builds on, so that memory too grows with a session's length, and
        not with its square."""
        if call.call_id in self._index:
            self._end(call)
            return
        base_index, keep = self._closest(call)
        base = None if base_index is None else self._calls[base_index]
        line = _encode(call, base_index, base, keep)
        self._write(line)
        call.prompt_ids = self._prompts.add(call.prompt_ids, base_index, line["prompt_ids"]["keep"])
        if base is not None:
            call.messages[:keep] = base.messages[:keep]
            call.tools = base.tools if base.tools == call.tools else call.tools
        self._index[call.call_id] = len(self._calls)
        self._sampled[call.call_id] = len(call.response_ids)
        self._calls.append(call)

    def amend(self, call_id: str, **fields: Any) -> None:
        self._write({"amend": call_id, **fields})
        self._sampled[call_id] += len(fields.get("response_ids", ()))

    def _end(self, call: ModelCall) -> None:
        known = self._sampled[call.call_id]
        rest = {name: getattr(call, name)[known:] for name in SAMPLED} if known < len(call.response_ids) else {}
        self.amend(call.call_id, **call.model_dump(mode="python", exclude=ASKED | SAMPLED), **rest)

    def close(self) -> None:
        self._closed = True
        file, self._file = self._file, None
        if self._reserve is not None:
            self._reserve.close()
        if file is not None:
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _closest(self, call: ModelCall) -> tuple[int | None, int]:
        """Return the call to build on, and how many leading messages it shares: the parent, else the recent call that
        shares most."""
        parent = self._index.get(call.parent_id or "")
        if parent is not None:
            return parent, _shared_messages(self._calls[parent], call)
        best: tuple[int | None, int] = (None, 0)
        for index in range(len(self._calls) - 1, max(-1, len(self._calls) - 1 - LOOK_BACK), -1):
            shared = _shared_messages(self._calls[index], call)
            if shared > best[1]:
                best = (index, shared)
        return best

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line, where the disk is full in space of the reserve. Raises `OSError`."""
        data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        if self._closed:
            raise ValueError(f"{self.path}: the journal is closed; its session has ended")
        if self._file is None or self._reserve is None:
            self._reserve = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - `close` closes it
            os.posix_fallocate(self._reserve.fileno(), 0, RESERVE)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            _append(self._file, data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            left = os.fstat(self._reserve.fileno()).st_size
            os.ftruncate(self._reserve.fileno(), max(0, left - max(2 * len(data), STEP)))
            _append(self._file, data)


def _append(file: int, data: bytes) -> None:
    """Append bytes to a file. Raises `OSError` where not all can be written (the disk is full), and then removes the
    written part."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        written = len(data) - len(left)
        os.ftruncate(file, os.fstat(file).st_size - written)  # else the next line would be a part of this one
        raise


def read_journal(path: Path) -> list[ModelCall]:
    """Return the calls of a journal, as captured. A torn last line (the process died while writing) is left out.

    Raises `JournalError` naming the file and line of any other damage.
    """
    reading = _Reading()
    try:
        with path.open("rb") as lines:
            for place, line in json_lines(lines, path, may_be_cut=True):
                reading.add(place, line)
    except ConfigError as error:
        raise JournalError(str(error), reading.whole_calls()) from error
    return reading.whole_calls()


def _encode(call: ModelCall, base_index: int | None, base: ModelCall | None, keep: int) -> dict[str, Any]:
    kept = {"messages": keep, "tools": 0, "prompt_ids": 0}
    if base is not None:
        kept["tools"] = len(base.tools) if base.tools == call.tools else 0
        different = first_difference(base, call)
        kept["prompt_ids"] = len(base.prompt_ids) + len(base.response_ids) if different is None else different
    line = call.model_dump(mode="python", exclude=set(kept))
    for name, count in kept.items():
        line[name] = {"from": base_index, "keep": count, "new": getattr(call, name)[count:]}
    return line


def _shared_messages(base: ModelCall, call: ModelCall) -> int:
    most = min(len(base.messages), len(call.messages))
    if base.messages[:most] == call.messages[:most]:
        return most
    return next(i for i in range(most) if base.messages[i] != call.messages[i])


class _Piece(Record):
    """The next sampled tokens of a call."""

    response_ids: TokenIds
    logprobs: Logprobs

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.response_ids)} sampled ids but {len(self.logprobs)} logprobs")
        return self


class _Reading:
    """The calls of a journal, line by line. The pieces of an answer are joined when all of them are wanted, so that the
    time grows with the answer's length, not with its square. Calls share their history, as `Journal.append` has it."""

    def __init__(self) -> None:
        self._calls: list[ModelCall] = []
        self._index: dict[str, int] = {}
        """Call id -> the call's place in `_calls`."""
        self._pieces: dict[int, list[_Piece]] = {}
        """Place of a call -> what comes after the tokens that the call has."""
        self._prompts = SharedPrompts()

    def add(self, place: str, line: dict[str, Any]) -> None:
        """Add the call of a line, or amend the one that the line names. Raises `ConfigError` naming the place."""
        try:
            if "amend" in line:
                self._amend(self._index[line.pop("amend")], line)
            else:
                call = self._call(line)
                self._index[call.call_id] = len(self._calls)
                self._calls.append(call)
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{place}: not a line of a journal: {error!r}") from error

    def whole_calls(self) -> list[ModelCall]:
        """Return the calls, each with all of its tokens so far."""
        return [self._whole(index) for index in range(len(self._calls))]

    def _whole(self, index: int) -> ModelCall:
        call, pieces = self._calls[index], self._pieces.pop(index, None)
        if pieces is not None:
            call.response_ids = np.concatenate([call.response_ids, *(piece.response_ids for piece in pieces)])
            call.logprobs = np.concatenate([call.logprobs, *(piece.logprobs for piece in pieces)])
        return call

    def _amend(self, index: int, fields: dict[str, Any]) -> None:
        if fields.keys() == SAMPLED and self._calls[index].sampling_mask is None:
            self._pieces.setdefault(index, []).append(_Piece.model_validate(fields))
            return
        call = self._whole(index)
        for name in SAMPLED & fields.keys():
            fields[name] = [*getattr(call, name).tolist(), *fields[name]]
        self._calls[index] = amended = ModelCall.model_validate({**dict(call), **fields})
        amended.messages, amended.tools = call.messages, call.tools

    def _call(self, line: dict[str, Any]) -> ModelCall:
        shared: dict[str, list[Any]] = {}
        for name in ("messages", "tools"):
            part = line[name]
            kept = getattr(self._calls[part["from"]], name)[: part["keep"]] if part["from"] is not None else []
            line[name], shared[name] = [*kept, *part["new"]], kept
        part = line["prompt_ids"]
        new = np.asarray(part["new"], dtype=np.int32)
        if part["from"] is not None:
            base = self._whole(part["from"])
            new = np.concatenate([np.concatenate([base.prompt_ids, base.response_ids])[: part["keep"]], new])
        line["prompt_ids"] = new
        call = ModelCall.model_validate(line)
        for name, kept in shared.items():  # the validation has copied them
            getattr(call, name)[: len(kept)] = kept
        call.prompt_ids = self._prompts.add(call.prompt_ids, part["from"], part["keep"])
        return call
