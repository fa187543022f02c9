"""The ledger of a dataset directory: one line for each episode that the directory has seen, accepted or not."""

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
    """Number of the answers of the policy that the trace trains."""
    tokens: int
    trainable_tokens: int


class EpisodeEntry(Record):
    """One attempt at a task. Invariant: (session_id, attempt) occurs once in a directory."""

    session_id: str
    attempt: int
    task_id: str
    repo: str
    reward: float | None
    seconds: float = 0.0
    """How long the harness worked."""
    refused: str | None = None
    """Why the episode was refused; its traces were not examined. None: the episode was accepted."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Number of traces of an accepted episode that did not become rows, by reason. One reason is `duplicate`."""
    examples: list[ExampleEntry] = Field(default_factory=list)
