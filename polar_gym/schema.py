"""Every record that crosses a process boundary, and nothing else.

A `TaskRequest` expands into `num_samples` sessions. A `Session` is one harness run; every model call it makes is a
`ModelCall`. When the run ends the calls become `Trace`s, together a `Trajectory` with its token balance (`Fidelity`).
Trajectory, `EvaluationResult` and reward leave as one `Episode`.

Token ids, masks and logprobs are numpy arrays in memory (9 times smaller than lists) and plain JSON lists outside.
"""

from __future__ import annotations

import posixpath
import re
from datetime import date
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from polar_gym.record import Logprobs, LossMask, Record, TokenIds

Message = dict[str, Any]
"""One chat message in OpenAI Chat Completions form; an assistant's thinking is in `reasoning`."""

ToolDefinition = dict[str, Any]
"""One tool in OpenAI Chat Completions form: `{"type": "function", "function": {...}}`."""


# What is asked for ----------------------------------------------------------------------------------------------------


class PluginSpec(BaseModel):
    """A plug-in by name (`polar_gym.registry`), its options beside the name; the plug-in's `Options` checks them."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


LIBRARIES = "lib(32|64|x32|exec)?"
SYSTEM = re.compile(rf"/|/(bin|boot|dev|etc|{LIBRARIES}|proc|sbin|sys)(/.*)?|/usr(/(bin|{LIBRARIES}|sbin)(/.*)?)?")
"""Directories that programs are started from, or read by the dynamic loader as they start, also as root."""


def _inside(path: str) -> str:
    normal = posixpath.normpath(f"/{path.lstrip('/')}")
    if not path.startswith("/") or ".." in PurePosixPath(path).parts or SYSTEM.fullmatch(normal):
        raise ValueError(
            "expected an absolute path without '..' and outside of the system's directories, e.g. /workspace"
        )
    return normal


InsidePath = Annotated[str, AfterValidator(_inside)]
"""A path inside a sandbox. Runtimes put it behind directories of the machine, so it must not lead out of them; and
root's programs start there before the agent's, so it must not be where these come from."""

Environment = dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]
"""Environment variables, with names that a shell can set."""


class Workspace(Record):
    """The files that the harness works on."""

    source: str | None = None
    """A directory on the gateway's machine: plain files, or a git repository at its base commit; null: an empty one."""
    path: InsidePath = "/workspace"
    """Where it is inside the sandbox, and the harness's working directory."""
    python_requirements: list[str] = Field(default_factory=list)
    """Requirements of a virtual environment that is built once, cached by hash, and mounted read-only."""
    base_patch: str = ""
    """A git patch that the base commit has and the image's repository lacks: a planted bug. With it the repository has
    one commit and no past."""
    hidden_files: list[str] = Field(default_factory=list)
    """Files of the image's repository that the agent does not get to see; grading has them."""

    @model_validator(mode="after")
    def _of_an_image(self) -> Self:
        if self.source is not None and (self.base_patch or self.hidden_files):
            raise ValueError("base_patch and hidden_files are for an image's repository; leave `source` out")
        return self


class RuntimeSpec(PluginSpec):
    """Where a harness runs."""

    image: str | None = None
    """The container image; runtimes without images (bubblewrap) use the gateway machine's /usr."""
    workspace: Workspace = Field(default_factory=Workspace)
    environment: Environment = Field(default_factory=dict)
    """Extra environment variables inside the sandbox."""
    network: Literal["gateway", "none", "full"] = "gateway"
    """What the sandbox reaches: the session's gateway and nothing else; nothing at all; or the gateway and whatever the
    machine's network reaches. Grading gets no gateway, whatever is said here."""
    init_timeout_seconds: float = Field(default=300.0, gt=0)
    """For the sandbox to come up, with its workspace and the harness in it."""


_TODAY = {"anyOf": [{"type": "string", "format": "date"}, {"const": "auto"}, {"type": "null"}], "default": None}


def _auto_today(value: Any) -> Any:
    return date.today() if value == "auto" else value


class HarnessSpec(PluginSpec):
    """Which harness runs, and how it is told to behave."""

    profile: Literal["default", "lean"] = "default"
    """`default` leaves the harness as its users run it; `lean` shortens prompts and tool lists for small models."""
    model_name: str = "policy"
    """What the harness believes the model is called; some harnesses change their prompts by it."""
    max_output_tokens: int = Field(default=16384, gt=0)
    """What the harness is told that one answer may hold."""
    today: Annotated[date | None, BeforeValidator(_auto_today), WithJsonSchema(_TODAY)] = None
    """The date that the harness is told in every sample, so that one which starts after midnight has the prompt of the
    others; `auto`: the day on which the request is made; null: the machine's. Codex and OpenCode cannot be told."""


class EvaluatorSpec(PluginSpec):
    """What a finished sandbox is worth."""

    timeout_seconds: float = Field(default=600.0, gt=0)
    """For the evaluation, its fresh sandbox included."""


Kind = Literal["main", "subagent", "compaction", "auxiliary"]
"""What a call or a trace was for."""


class BuilderSpec(PluginSpec):
    """How captured calls become traces."""

    train_on_sampling_mismatch: bool = False
    """Train also on calls whose distribution the harness or the engine bent (a forced tool, a grammar)."""
    train_rejected: bool = True
    """Train also on answers that the harness threw away, asking the same again: they are the policy's failures."""
    train_kinds: list[Kind] = ["main", "subagent", "compaction"]
    """Calls of other kinds (`auxiliary`: titles, summaries for the screen) are excluded."""


class Sampling(Record):
    """The distribution that the policy samples from: every field is sent, so no engine or model default applies."""

    temperature: float = Field(default=1.0, ge=0)
    """1.0 is the model's own distribution, which training assumes."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that have this much probability together; 1.0 is off."""
    top_k: int = Field(default=-1, ge=-1)
    """Only so many of the likeliest tokens; -1 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens with this share of the likeliest one's probability; 0.0 is off."""
    presence_penalty: float = 0.0
    """Against tokens that were sampled before; 0.0 is off."""
    frequency_penalty: float = 0.0
    """Against tokens that were sampled before, by how often; 0.0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the logits of tokens seen before, the prompt's included; 1.0 is off."""
    seed: int | None = None
    """The engine's seed for each call; null: it draws its own."""


class Budget(Record):
    """Limits that end a session early, with what was captured so far."""

    max_calls: int | None = Field(default=None, gt=0)
    """Model calls of one session; null: no limit."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Tokens that one session may sample; null: no limit."""


class Retries(Record):
    """How often the rollout service tries one sample again."""

    node_death: int = Field(default=2, ge=0)
    """After its node died, or was restarted, while it was under way there; to have waited there costs none."""
    failure: int = Field(default=0, ge=0)
    """After an infrastructure failure. Off: what fails may depend on what the agent does, and drawing such samples
    again in silence biases the task towards the agents that avoid it."""


HARNESS_SECONDS = 1800.0
"""How long a harness may work on a task, where neither a request nor a config says otherwise."""


class TaskRequest(Record):
    """One task, to be sampled `num_samples` times."""

    task_id: str = Field(min_length=1)
    instruction: str = Field(min_length=1)
    num_samples: int = Field(default=1, gt=0)
    timeout_seconds: float = Field(default=HARNESS_SECONDS, gt=0)
    """The agent's own budget; init and evaluation have theirs."""
    runtime: RuntimeSpec
    agent: HarnessSpec
    builder: BuilderSpec = Field(default_factory=lambda: BuilderSpec(name="prefix_merging"))
    evaluator: EvaluatorSpec = Field(default_factory=lambda: EvaluatorSpec(name="session_completion"))
    sampling: Sampling = Field(default_factory=Sampling)
    budget: Budget = Field(default_factory=Budget)
    retries: Retries = Field(default_factory=Retries)
    stop_when_usable: int | None = Field(default=None, gt=0)
    """End the other samples as soon as so many are usable. Off: it biases the group towards short runs."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many weight versions a session may lie behind; null: any number."""
    when_stale: Literal["mark", "cancel"] = "mark"
    """What becomes of a session that lies further behind."""
    callback_url: str | None = None
    """http or https: where the rollout service posts each result (`polar_gym.protocol.Callback`)."""
    metadata: dict[str, Any] = Field(default_factory=dict)


# What happened --------------------------------------------------------------------------------------------------------


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


class WeightVersion(Record):
    """Which weights sampled `response_ids[start:end]`."""

    version: str
    """The trainer's: the one that was set when the call began, or by its end (`initial`: none had been). Where the
    trainer never set one, the engine's own label."""
    engine_version: str | None = None
    """The engine's own label of its weights; None where it names none."""
    start: int
    end: int
    estimated: bool = False
    """The engine did not confirm it: it names no label, or one that is not the trainer's."""
    until: str | None = None
    """Set for estimated spans whose weights changed during the call: the version at its end. The token is unknown."""
    older_cache: bool = False
    """Sampled after an update in the middle of its call: what comes before it is in the engine's cache as earlier
    weights computed it, unless whoever updated them had the engine compute it again."""


class ModelCall(Record):
    """What one request through the proxy was.

    Invariant: `len(response_ids) == len(logprobs)`; with splicing, `prompt_ids + response_ids` is the exact prefix of
    its child's `prompt_ids`.
    """

    call_id: str
    session_id: str
    index: int = Field(ge=0)
    """Order of arrival within the session."""
    provider: str
    model: str
    messages: list[Message]
    tools: list[ToolDefinition] = Field(default_factory=list)
    response: Message | None = None
    """The assistant message as the engine parsed it; None when no answer was received."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Every sampling field as it was sent to the engine."""
    sampling_mismatch: list[str] = Field(default_factory=list)
    """Causes that bent the policy's distribution: fields of the harness (a forced tool, a grammar), or the engine's
    `own_grammar`."""
    single_tool_call: bool = False
    """The harness offered tools and asked for at most one call of them. The engine was not told, because it would hold
    the answer to a grammar: the policy may have called several."""
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str | None = None
    parent_id: str | None = None
    """The call whose history and answer this one's request extends, by its messages."""
    continuation: Literal["root", "spliced", "canonical"] = "root"
    """`spliced`: the parent's ids plus the new ones, sent pre-tokenised; `canonical`: templated by the engine although
    there is a parent; `root`: no parent."""
    splice_cause: str | None = None
    """Why a continuation was not spliced, or why a request that names known calls continues none."""
    weight_versions: list[WeightVersion] = Field(default_factory=list)
    outcome: Literal["delivered", "abandoned", "failed"] = "delivered"
    """`abandoned`: the harness hung up before its answer was complete; `failed`: the engine gave no answer."""
    hints: dict[str, str] = Field(default_factory=dict)
    """What the harness's `classify` read in the request: `kind` (subagent, compaction, auxiliary), `thread`."""
    started_at: float
    """Unix time, seconds."""
    duration: float
    """Seconds from the request's arrival to the engine's complete answer."""
    error: str | None = None
    error_kind: str | None = None
    """`context_length`: the conversation outgrew the model, which is the policy's doing; others are the machinery's."""

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(
                f"call {self.call_id}: {len(self.response_ids)} sampled ids but {len(self.logprobs)} logprobs"
            )
        return self


class Trace(Record):
    """One training sequence: `prompt_ids` (never trained), then `response_ids` with its mask and logprobs.

    Invariant: `response_ids`, `loss_mask` and `logprobs` have one length; `logprobs` is 0.0 where `loss_mask` is 0.
    """

    trace_id: str
    session_id: str
    kind: Kind = "main"
    prompt_ids: TokenIds
    response_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    weight_versions: list[WeightVersion] = Field(default_factory=list)
    """Spans of `response_ids`."""
    messages: list[Message]
    tools: list[ToolDefinition] = Field(default_factory=list)
    finish_reason: str | None = None
    call_ids: list[str]
    reward: float | None = None

    @property
    def trainable_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


class Break(Record):
    """A call that, by its messages, belongs to a known conversation, and by its tokens does not continue it."""

    call_id: str
    parent_id: str | None = None
    """None: the request names known calls, but continues none of them."""
    position: int | None = None
    """The first prompt position that differs from the parent's prompt and answer."""
    cause: str


class Fidelity(Record):
    """The token balance of a session: `sampled_tokens == trainable_tokens + sum(excluded.values())`, exactly."""

    sampled_tokens: int = 0
    """Sampled by the engine and received by the gateway, over all calls."""
    trainable_tokens: int = 0
    excluded: dict[str, int] = Field(default_factory=dict)
    """Tokens not trained on, by reason."""
    calls: int = 0
    traces: int = 0
    traces_by_kind: dict[str, int] = Field(default_factory=dict)
    traces_per_request: int = 0
    """What `per_request` would have given."""
    spliced: int = 0
    """Continuations whose prompt was the ids already seen plus the new ones."""
    canonical: int = 0
    """Continuations that the engine templated anew, and whose token prefix held all the same."""
    breaks: list[Break] = Field(default_factory=list)
    """Continuations whose token prefix broke: each begins a new trace."""
    single_tool_call: int = 0
    """Calls whose harness asked for at most one tool call, of which the engine was not told."""

    @property
    def balanced(self) -> bool:
        return self.sampled_tokens == self.trainable_tokens + sum(self.excluded.values())


class Trajectory(Record):
    """All traces of a session and the balance that proves that nothing was lost."""

    builder: str
    traces: list[Trace]
    fidelity: Fidelity


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
