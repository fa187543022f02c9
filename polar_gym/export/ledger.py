"""What a dataset directory knows of the episodes that it has seen: one line each, accepted or not."""

from __future__ import annotations

from pydantic import Field

from polar_gym.record import Record
from polar_gym.schema import Kind


class ExampleEntry(Record):
    """One trace that became a row."""

    digest: str
    split: str
    kind: Kind
    messages: int
    turns: int
    """Answers of the policy."""
    tokens: int
    trainable_tokens: int


class EpisodeEntry(Record):
    """One attempt at a task. Invariant: (session_id, attempt) occurs once in a directory."""

    session_id: str
    attempt: int
    task_id: str
    repo: str
    reward: float | None
    refused: str | None = None
    """Why no trace of it was looked at; None: it was accepted."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Traces of an accepted episode that became no row, by reason; `duplicate` among them."""
    examples: list[ExampleEntry] = Field(default_factory=list)
