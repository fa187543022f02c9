"""One session: how it went, what it left behind, what it was worth."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from polar_gym.record import Record
from polar_gym.schema.request import TaskRequest
from polar_gym.schema.trajectory import Trajectory


class Status(StrEnum):
    QUEUED = "QUEUED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    RUNNING = "RUNNING"
    BUILDING = "BUILDING"
    EVALUATING = "EVALUATING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"
    INTERRUPTED = "INTERRUPTED"
    """The node that ran it died."""

    @property
    def final(self) -> bool:
        return self in (Status.COMPLETED, Status.ERROR, Status.CANCELLED, Status.INTERRUPTED)


class Failure(Record):
    """Why a session has no usable result."""

    stage: Status
    kind: str
    """A short name, e.g. `harness_error`, `runtime_error`, `engine_error`, `evaluator_error`."""
    message: str


class Timing(Record):
    """Seconds spent in each stage (wall clock); None where the stage was not reached."""

    queued: float | None = None
    init: float | None = None
    ready: float | None = None
    running: float | None = None
    building: float | None = None
    evaluating: float | None = None


class Session(Record):
    """One sample of a task."""

    session_id: str
    task_id: str
    sample_index: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    """Counts the times that the session was begun: again when a node died."""
    harness: str
    status: Status = Status.QUEUED
    truncated_by: Literal["time", "calls", "tokens"] | None = None
    """Which budget ended it, if one did."""
    exit_code: int | None = None
    """What the harness exited with; None when it was killed or never started."""
    failure: Failure | None = None
    node: str | None = None
    weight_version: str | None = None
    """The version that was set when its run began; None where none ever was."""
    staleness: int | None = Field(default=None, ge=0)
    """Weight versions set between the beginning of its run and the arrival of its episode at the rollout service."""
    timing: Timing = Field(default_factory=Timing)


class EvaluationResult(Record):
    """What the finished sandbox was worth, and why."""

    evaluator: str
    reward: float
    resolved: bool | None = None
    tests: dict[str, str] = Field(default_factory=dict)
    """Test name -> PASSED | FAILED | ERROR | SKIPPED | MISSING."""
    components: dict[str, float] = Field(default_factory=dict)
    detail: str = ""
    """One line for a person: what decided the reward."""
    log: str = ""
    """The end of the grader's output."""


OwnGrammar = Literal["none", "tools", "all"]
"""Which calls an engine holds to a grammar that they do not ask for: none, those with tools, or all."""


class EngineInfo(Record):
    """What sampled the tokens."""

    name: str
    model: str
    scripted: bool = False
    """The tokens follow a script: nothing was sampled from a model, and nothing may be trained on them by accident."""
    max_model_len: int
    tokenizer: str | None = None
    """A directory or `tokenizer.json` that decodes the ids, where the engine names one."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Whether logprobs are taken before or after temperature and truncation; None where that is not known."""
    own_grammar: OwnGrammar | None = None
    """The answer of the server at the start; None where it cannot be asked."""
    path: Literal["chat", "generate", "plain"] | None = None
    """How prompts reach an engine behind a URL: by its chat route with ids, by ids alone, or by chat without ids, so
    that nothing is spliced."""


class Artifacts(Record):
    """What the run left behind."""

    final_message: str = ""
    diff: str = ""
    """The agent's changes as a git patch; binary files as git binary patches."""
    not_carried: list[str] = Field(default_factory=list)
    """Files outside of the workspace, or ignored in it, that are in no diff and were not graded; the first 50."""
    stdout: str = ""
    stderr: str = ""
    """The end of the harness's own output."""
    journal: str | None = None
    """The node's file that holds the captured calls."""


class Episode(Record):
    """One session with everything a trainer needs: the trajectory and its reward."""

    session: Session
    request: TaskRequest
    engine: EngineInfo
    trajectory: Trajectory
    reward: float | None
    """None when the session failed: such an episode must be masked, not scored."""
    evaluation: EvaluationResult | None = None
    artifacts: Artifacts = Field(default_factory=Artifacts)

    @property
    def truncated(self) -> bool:
        return self.session.truncated_by is not None
