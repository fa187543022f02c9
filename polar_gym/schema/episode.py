"""The records of one session: its states, the results of its run, its evaluation, and the episode with all of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field

from polar_gym.record import Record, digest
from polar_gym.schema.request import StartFrom, TaskRequest
from polar_gym.schema.trajectory import Trace, Trajectory


class Status(StrEnum):
    """The state of a session."""

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
    """The node that ran the session died."""

    @property
    def final(self) -> bool:
        return self in (Status.COMPLETED, Status.ERROR, Status.CANCELLED, Status.INTERRUPTED)


class Failure(Record):
    """The reason why a session has no usable result."""

    stage: Status
    kind: str
    """A short name. Of a node: `harness_error`, `engine_error`, `runtime_error`, `gateway_error`, `evaluator_error`,
    `logprobs_mismatch`, `interrupted`, `diverged`. Of the rollout server: `request_error`, `node_died`, `no_reward`,
    `stale`, `early_stop`, `cancelled`."""
    message: str


class Timing(Record):
    """Seconds spent in each stage (wall clock); None where the stage was not reached."""

    queued: float | None = None
    init: float | None = None
    ready: float | None = None
    running: float | None = None
    building: float | None = None
    evaluating: float | None = None
    replay: float | None = None
    """The part of `running` until the recorded calls were answered; None where the session has no record."""

    def stages(self) -> dict[str, float | None]:
        """Return the seconds of each stage, in the order of a session's life."""
        return self.model_dump(exclude={"replay"})


class Session(Record):
    """One sample of a task."""

    session_id: str
    task_id: str
    sample_index: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    """The number of this attempt, from 0: the session is begun again when its node dies."""
    harness: str
    status: Status = Status.QUEUED
    truncated_by: Literal["time", "calls", "tokens"] | None = None
    """The budget that ended the session, if one did."""
    exit_code: int | None = None
    """The exit code of the harness; None when it was killed or never started."""
    failure: Failure | None = None
    node: str | None = None
    weight_version: str | None = None
    """The version of the weights that was set when the run began; None where no version was ever set."""
    staleness: int | None = Field(default=None, ge=0)
    """The number of weight versions that were set between the beginning of the run and the arrival of its episode at
    the rollout service. Weights with a name that was never set lie behind all versions."""
    timing: Timing = Field(default_factory=Timing)

    @property
    def label(self) -> str:
        """The name of this attempt, which its sandboxes have too: no other attempt, on any node, has the same."""
        return f"{self.session_id}.{self.attempt}"


class EvaluationResult(Record):
    """The reward of a finished sandbox, and the reasons for it."""

    evaluator: str
    reward: float
    resolved: bool | None = None
    tests: dict[str, str] = Field(default_factory=dict)
    """Test name -> PASSED | FAILED | ERROR | SKIPPED | MISSING."""
    components: dict[str, float] = Field(default_factory=dict)
    detail: str = ""
    """One line for a person, which names the reason of the reward."""
    log: str = ""
    """The end of the grader's output."""
    trust: Literal["high", "low"] | None = None
    """`low`: code that forges results inside of the test process would go unnoticed; None: the evaluator cannot say."""
    call_rewards: dict[str, float] = Field(default_factory=dict)
    """Call id -> the reward of that call alone, in the order in which the calls arrived; calls may be missing."""


OwnGrammar = Literal["none", "tools", "all"]
"""Which calls an engine forces into a grammar that they do not ask for: none, those with tools, or all."""


ReplayRecord = Literal["routed_experts", "sampling_mask"]


class EngineInfo(Record):
    """The engine that sampled the tokens."""

    name: str
    model: str
    scripted: bool = False
    """True where the tokens follow a script. No model sampled them, and they must not be trained on by accident."""
    max_model_len: int
    tokenizer: str | None = None
    """A directory or `tokenizer.json` that decodes the ids; None where the engine names none."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Whether logprobs are taken before or after temperature and truncation; None where that is not known."""
    own_grammar: OwnGrammar | None = None
    """The calls with a grammar of the server's own, as the server said at the start; None where it cannot be asked."""
    path: Literal["chat", "generate", "plain"] | None = None
    """How prompts reach an engine behind a URL. `chat`: its chat route, with ids. `generate`: ids alone. `plain`: its
    chat route without ids, so that nothing is spliced."""
    stream_interval: int | None = None
    """How many sampled tokens the engine holds back at most before it sends them; None where an answer comes whole."""
    base_model: str | None = None
    """The model below, where `model` is a LoRA adapter."""
    records: list[ReplayRecord] = Field(default_factory=list)
    """What each complete answer holds beside ids and logprobs, for trainers that replay the sampler's choices."""


class Artifacts(Record):
    """The results of a run, apart from its calls."""

    final_message: str = ""
    diff: str = ""
    """The harness's changes as a git patch; binary files as git binary patches."""
    not_carried: list[str] = Field(default_factory=list)
    """Files outside of the workspace, or ignored in it, that are in no diff and were not graded; the first 50."""
    refused_fields: list[str] = Field(default_factory=list)
    """Fields of the harness's requests that the gateway cannot translate, for which it refused these requests; the
    first 50 by name. None of these requests is among the calls."""
    project_settings: list[str] = Field(default_factory=list)
    """Files of the task's workspace from which the harness takes settings: its prompt, its tools, its limits."""
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

    def unscored(self) -> Episode:
        """Return the episode without its rewards."""
        traces = [
            trace.model_copy(
                update={"reward": None, "turns": [turn.model_copy(update={"reward": None}) for turn in trace.turns]}
            )
            for trace in self.trajectory.traces
        ]
        trajectory = self.trajectory.model_copy(update={"traces": traces})
        return self.model_copy(update={"trajectory": trajectory, "reward": None, "evaluation": None})

    @property
    def branch_point(self) -> StartFrom | None:
        """Return the state of another session that this one began with; None: it began at the start of its task."""
        start = self.request.start_from
        return None if start is None or start.owned or start.calls == 0 else start

    @property
    def group(self) -> str:
        """Return the name of the sessions that an advantage compares with this one: those that were sampled from the
        same state by the same harness.

        The state is a task, or a state of another session: the reward of a branch depends on what was done before it. A
        branch with `when_divergent=live` that did not ask for all of its recorded calls left that state, and is alone;
        with `calls=null`, too, for how many these are is not known. No policy chooses its harness or its instruction,
        so the name ends with a digest of the instruction and of the harness's settings. The date is no part of it.
        """
        start, agent = self.branch_point, self.request.agent
        state = self.session.task_id
        if start is not None:
            state = f"{state}, {start.calls} calls of {PurePath(start.record).name}"
            if start.when_divergent == "live" and self.trajectory.branched not in (None, start.calls):
                state = f"{state}, left by {self.session.session_id}"
        told = digest(self.request.instruction, agent.model_dump(mode="json", exclude={"today"}))
        return f"{state}, {self.session.harness} {agent.profile} {told}"

    def sampled_with(self, trace: Trace) -> dict[str, Any]:
        """Return how the tokens of a trace were sampled, for a trainer that computes their logprobs again: the trace's
        sampling, and `logprobs_mode`, which says whether the captured logprobs are taken before or after it."""
        asked = self.request.sampling.model_dump(exclude={"seed"})
        return {**asked, **trace.sampling, "logprobs_mode": self.engine.logprobs_mode}
