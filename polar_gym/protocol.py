"""The records that rollout server, gateway nodes and clients exchange over HTTP: the contract of the service.

The routes that take and give these records are `polar_gym.http.server_routes` (trainer or node to server) and
`polar_gym.http.node_routes` (server to node). The server describes its own at /openapi.json.

The server pushes each session to the node with the most free places. The node reports by heartbeat, and delivers each
episode until the server has said that the episode is stored. A session may have more than one attempt, because its node
may die: the key of everything is (session id, attempt). One attempt is accepted, and the others are kept as excluded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from polar_gym.record import Record
from polar_gym.schema import EngineInfo, Episode, Session, TaskRequest


class ErrorAnswer(Record):
    """The reason why a request was refused: `error` names the field, its value and the fix."""

    error: str


class Generation(Record):
    """Trainer to server to nodes: whether model calls are let through to the engine."""

    paused: bool = False
    """New calls of harnesses wait until generation is resumed; a wait does not use up the harness's budget."""
    running: Literal["finish", "keep"] = "finish"
    """When the pause is acknowledged. `finish`: when the last call under way has its answer. `keep`: at once; the calls
    under way stay open, and go on when the engine does."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """How long to wait for the calls under way."""


class Weights(Record):
    """Trainer to server to nodes: the engine's weights were updated."""

    version: str = Field(min_length=1, max_length=256)
    engine: str | None = None
    """The URL of the one server that has the weights, where engines are updated one after another: only calls of that
    server are marked with the version. An order for all, with the last one, tells the server of the new version."""


class GenerationAnswer(Record):
    """Node to server: the present state of model calls on this node."""

    paused: bool
    in_flight: int = Field(ge=0)
    """Calls that are under way. With `paused` and `running="finish"`, 0 unless the timeout has passed."""
    weight_version: str | None = None
    engines: dict[str, str | None] = Field(default_factory=dict)
    """URL -> version of its weights, for each server of the node's engine, where `engine.url` names some."""


class GenerationState(Record):
    """Server to trainer: the acknowledgements of all nodes."""

    generation: Generation
    weight_version: str | None = None
    nodes: dict[str, GenerationAnswer] = Field(default_factory=dict)
    unreached: dict[str, str] = Field(default_factory=dict)
    """Node -> why it did not acknowledge. The node follows as soon as its next heartbeat is answered."""

    @property
    def settled(self) -> bool:
        """True where every node follows, and (when paused with `finish`) no call is under way on any node."""
        idle = self.generation.running == "keep" or not any(node.in_flight for node in self.nodes.values())
        return not self.unreached and (idle or not self.generation.paused)


class StageCounts(Record):
    """A number of places or of sessions for each stage."""

    init: int = Field(default=0, ge=0)
    ready: int = Field(default=0, ge=0)
    run: int = Field(default=0, ge=0)
    postrun: int = Field(default=0, ge=0)


class JournalPiece(Record):
    """Node to server and back: the next lines of the journal of an attempt of a session."""

    session_id: str
    attempt: int = Field(ge=0)
    start: int = Field(default=0, ge=0)
    """The place of the first line in the journal, in bytes."""
    lines: str
    manifest: str | None = None
    """The facts of the session (`Manifest`), with the first lines."""


class Journals(Record):
    """Node to server, every few seconds: what the journals of running sessions have more than before."""

    pieces: list[JournalPiece]


class JournalsAnswer(Record):
    """Server to node: how far the server has these journals."""

    sizes: dict[str, int]
    """`SESSION.ATTEMPT` -> bytes. A journal that is missing here is not wanted any more."""


class Dispatch(Record):
    """Server to node: run this session. The same (session id, attempt) twice is one session."""

    session_id: str
    attempt: int = Field(default=0, ge=0)
    sample_index: int = Field(ge=0)
    request: TaskRequest
    resume: bool = False
    """True: a node died while it ran the last attempt. The session goes on with its record, if its node finds that."""
    records: list[JournalPiece] = Field(default_factory=list)
    """With `resume`: the journals of earlier attempts that the server has, for a node that finds none."""
    record_from: int = Field(default=0, ge=0)
    """The first attempt whose record counts: those before it failed, or could not go on with their record."""


class Heartbeat(Record):
    """Node to server, every few seconds: the node lives, and holds these sessions."""

    node: str
    url: str
    """The URL at which the server reaches the node's control port."""
    incarnation: str
    """An id of this process of the node: sessions of an earlier process are not running any more."""
    engine: EngineInfo
    engine_key: str
    """Identifies the engine: sessions of one task prefer nodes with the same key, for the engine's prefix cache."""
    places: StageCounts
    held: StageCounts
    waiting: int = Field(default=0, ge=0)
    """The number of sessions that were accepted and wait for INIT."""
    draining: bool = False
    """True: the node finishes its sessions and takes no new ones."""
    sessions: list[Session] = Field(default_factory=list)
    """Every session that the node holds and has not delivered."""


class HeartbeatAnswer(Record):
    """Server to node: the sessions to give up, and the orders that hold."""

    lease_seconds: float
    """A node that was silent for this time counts as dead: its sessions are dispatched again to other nodes."""
    known: bool = True
    """False: the server does not know some of the sessions, or not any more; `cancel` names them."""
    cancel: list[str] = Field(default_factory=list)
    """Session ids whose attempt on this node is no longer wanted."""
    generation: Generation = Field(default_factory=Generation)
    """The trainer's last order: a node that has just started, or that missed the order, follows it now."""
    weight_version: str | None = None
    """The version that the trainer last set; None: the trainer has set none."""
    engines: dict[str, str] = Field(default_factory=dict)
    """The versions of servers, by their URLs, that the trainer has updated alone since: a rolling update."""
    draining: bool = False
    """True: begin to drain."""


class Delivery(Record):
    """Node to server: one finished (or salvaged) episode."""

    attempt: int = Field(ge=0)
    episode: Episode


class DeliveryAnswer(Record):
    """Server to node: the episode is stored, and the node need not send the episode again."""

    accepted: bool
    """False: another attempt of the session was accepted already, or the task is gone. The episode is kept as
    excluded."""


class TaskStatus(StrEnum):
    """The status of a task as a whole."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    """At least one sample is usable."""
    FAILED = "FAILED"
    """All samples ended, and none is usable."""
    CANCELLED = "CANCELLED"


class TaskState(Record):
    """Server to trainer: the progress of a task."""

    task_id: str
    status: TaskStatus
    request: TaskRequest
    sessions: list[Session]
    created_at: float
    """Unix time, seconds."""
    finished_at: float | None = None
    usable: int = 0
    """Accepted episodes with a reward."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Kind of failure -> how many samples ended with it."""
    stopped_early: bool = False
    """True: `request.stop_when_usable` ended samples that were under way, so the others are biased to short runs."""
    stale: int = 0
    """Accepted episodes that were begun more than `request.max_staleness` weight versions ago."""


class TaskPage(Record):
    """Server to trainer: a page of the list of tasks, newest first."""

    tasks: list[TaskState]
    next: str | None = None
    """The value of `after` for the next page; None: this page is the last."""


class Event(Record):
    """Server to trainer: one event of a task."""

    id: int
    """Grows from event to event; a stream that broke off is resumed after the last id received."""
    task_id: str
    at: float
    kind: Literal[
        "task.submitted",
        "session.dispatched",
        "session.status",
        "session.retried",
        "session.ended",
        "session.excluded",
        "task.ended",
        "callback.delivered",
        "callback.given_up",
    ]
    session_id: str | None = None
    attempt: int | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class NodeState(Record):
    """Server to trainer: the state of one node as the server knows it."""

    node: str
    alive: bool
    draining: bool
    silent_seconds: float
    heartbeat: Heartbeat


class Transcript(Record):
    """Node to server: the end of a running session's conversation."""

    session_id: str
    attempt: int
    calls: int
    """Recorded calls."""
    lines: list[tuple[str, str]]
    """Role and text of the latest call's last messages, shortened: at most 4 lines of 300 characters each."""


class TaskProgress(Record):
    """Server to the live page: how far a task is."""

    task_id: str
    status: TaskStatus
    harness: str
    created_at: float
    samples: dict[str, int]
    """`waiting`, `placed` or `ended` -> how many samples."""
    usable: int
    failures: dict[str, int]


class Disk(Record):
    """The server's disk, in bytes."""

    stored: int
    """Episodes that the server keeps."""
    keep: int
    """`keep_bytes`: above this number, fetched episodes are deleted."""
    refuse: int
    """`refuse_bytes`: above this number, new tasks are refused."""
    free: int
    """Free space on the disk of the server's state."""


class LearningRun(Record):
    """A run of `polar-gym learn`, as its files tell."""

    name: str
    seed: int | None = None
    lines: list[dict[str, Any]] = Field(default_factory=list)
    """The objects of `steps.jsonl`; see `polar_gym.learning.run`."""
    problem: str = ""
    """The reason why the files cannot be read."""


class LiveSession(Record):
    """Server to the live page: a session that has begun and not ended, and the end of its conversation."""

    session: Session
    calls: int | None = None
    """As in `Transcript`, and so are the lines; None where the session has no transcript."""
    lines: list[tuple[str, str]] = Field(default_factory=list)


class Live(Record):
    """Server to the live page: what the service does now."""

    at: float
    """Unix time, seconds."""
    generation: Generation
    weight_version: str | None = None
    behind: dict[str, int]
    """Weight version of a running session -> how many versions were set since."""
    tasks: dict[str, TaskProgress]
    """The newest live tasks, by their ids."""
    live_tasks: int
    waiting: int
    """Samples that wait for a node."""
    ended_tasks: dict[str, int]
    """Status -> how many tasks ended since the server was started; so are the next three."""
    episodes: dict[str, int]
    failures: dict[str, int]
    """Kind -> how many samples ended with this failure."""
    retried: int
    nodes: dict[str, NodeState]
    """By name; `sessions` has the sessions of their heartbeats."""
    sessions: dict[str, LiveSession]
    """`SESSION.ATTEMPT` -> the session."""
    unreached: dict[str, str]
    """Node -> why its transcripts are missing."""
    disk: Disk
    runs: list[LearningRun]


class Callback(Record):
    """Server to the task's `callback_url`, at least once: a sample has ended, or the whole task has ended.

    Headers: `Polar-Gym-Idempotency-Key` is the same for every repetition; `Polar-Gym-Timestamp` (Unix seconds) and
    `Polar-Gym-Signature` (`v1=` and the hex HMAC-SHA256 of timestamp, ".", body) prove who sent it and when.
    """

    kind: Literal["session", "task"]
    task_id: str
    session: Session | None = None
    """Set in a `session` callback."""
    episode: Episode | None = None
    """None: the session ended without an episode (its node died, or it was cancelled), or the kind is `task`."""
    task: TaskState | None = None
    """Set in a `task` callback."""
