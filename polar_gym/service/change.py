"""A change of a task: the samples, events, callbacks and the episode that the store writes together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from polar_gym.protocol import Event
from polar_gym.service.task import Sample, Task


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A callback to be made. `session_id` None: the callback tells the end of the task."""

    key: str
    task_id: str
    session_id: str | None
    attempt: int | None
    url: str
    created_at: float
    tries: int = 0

    @property
    def host(self) -> str:
        """The part of the URL that names the receiver's host, such as `http://trainer:8000/`."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/"


@dataclass(frozen=True, slots=True)
class NewEpisode:
    """An episode that was delivered. Its file is on the disk already."""

    session_id: str
    attempt: int
    task_id: str
    accepted: bool
    reason: str
    stored_at: float
    size: int


@dataclass(slots=True)
class Change:
    """All that one decision changes."""

    task: Task | None = None
    new: bool = False
    """This change writes the task for the first time."""
    samples: list[Sample] = field(default_factory=list)
    """The samples of `task` that changed."""
    events: list[Event] = field(default_factory=list)
    """The store gives them their ids."""
    callbacks: list[OutboxEntry] = field(default_factory=list)
    episode: NewEpisode | None = None
