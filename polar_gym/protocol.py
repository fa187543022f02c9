"""What rollout server, gateway nodes and clients say to each other over HTTP: the contract of the service.

    trainer --> server   POST /v1/tasks, GET /v1/tasks/{task_id}, ...            (service key)
    server  --> node     PUT /v1/sessions/{session_id}/{attempt}, DELETE, ...    (node key)
    node    --> server   POST /v1/nodes/{node}/heartbeat, /v1/nodes/{node}/episodes   (node key)

The server pushes sessions to the node with most room; the node reports by heartbeat, and delivers each episode until
the server has said that it is stored. A session may be tried more than once (its node died): everything is keyed by
(session id, attempt), one attempt is accepted, and the others are kept as excluded.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar_gym.record import Record
from polar_gym.schema import EngineInfo, Episode, Session, TaskRequest


class StageCounts(Record):
    """Places, or sessions, by stage."""

    init: int = Field(default=0, ge=0)
    ready: int = Field(default=0, ge=0)
    run: int = Field(default=0, ge=0)
    postrun: int = Field(default=0, ge=0)


class Dispatch(Record):
    """Server to node: run this session. The same (session id, attempt) twice is one session."""

    session_id: str
    attempt: int = Field(default=0, ge=0)
    sample_index: int = Field(ge=0)
    request: TaskRequest


class Heartbeat(Record):
    """Node to server, every few seconds: that it lives, and all that it holds."""

    node: str
    url: str
    """Where the server reaches the node's control port."""
    incarnation: str
    """New for every start of the process: the sessions of an earlier one are not running any more."""
    engine: EngineInfo
    engine_key: str
    """Names the engine: sessions of one task prefer nodes with one key, for its prefix cache."""
    places: StageCounts
    held: StageCounts
    waiting: int = Field(default=0, ge=0)
    """Sessions that were accepted and wait for INIT."""
    draining: bool = False
    """Finishes what it has; takes nothing new."""
    sessions: list[Session] = Field(default_factory=list)
    """Every session that the node holds and has not delivered."""


class HeartbeatAnswer(Record):
    """Server to node."""

    lease_seconds: float
    """A node that was silent for so long counts as dead: its sessions are dispatched again elsewhere."""
    known: bool = True
    """False: the server does not know (any more) some of the sessions; `cancel` names them."""
    cancel: list[str] = Field(default_factory=list)
    """Session ids whose attempt on this node is no longer wanted."""


class Delivery(Record):
    """Node to server: one finished (or salvaged) episode."""

    attempt: int = Field(ge=0)
    episode: Episode


class DeliveryAnswer(Record):
    """Server to node: the episode is stored, and need not be sent again."""

    accepted: bool
    """False: another attempt of the session was accepted already, or the task is gone; it is kept as excluded."""


class TaskStatus(StrEnum):
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    """At least one sample is usable."""
    FAILED = "FAILED"
    """All samples ended, none is usable."""
    CANCELLED = "CANCELLED"


class TaskState(Record):
    """Server to trainer: how far a task is."""

    task_id: str
    status: TaskStatus
    request: TaskRequest
    sessions: list[Session]
    usable: int = 0
    """Episodes with a reward."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Kind of failure -> how many samples ended with it."""
