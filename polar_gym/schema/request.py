"""The records of a request: one task, and how a harness works on the task."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

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

from polar_gym.record import Record
from polar_gym.schema.call import Kind


class PluginSpec(BaseModel):
    """A plug-in by name (`polar_gym.registry`) and its options beside the name; the plug-in's `Options` checks them."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


LIBRARIES = "lib(32|64|x32|exec)?"
SYSTEM = re.compile(rf"/|/(bin|boot|dev|etc|{LIBRARIES}|proc|sbin|sys)(/.*)?|/usr(/(bin|{LIBRARIES}|sbin)(/.*)?)?")
"""Directories that hold programs, or files that the dynamic loader reads when a program starts, also as root."""


def _inside(path: str) -> str:
    """Return the normal form of a path. Raises `ValueError` for a path that is not an `InsidePath`."""
    normal = posixpath.normpath(f"/{path.lstrip('/')}")
    if not path.startswith("/") or ".." in PurePosixPath(path).parts or SYSTEM.fullmatch(normal):
        raise ValueError(
            "expected an absolute path without '..' and outside of the system's directories, e.g. /workspace"
        )
    return normal


InsidePath = Annotated[str, AfterValidator(_inside)]
"""A path inside a sandbox.

Runtimes append it to directories of the machine, so it must not lead out of those directories. Root's programs start in
the sandbox before the harness does, so it must not be a directory that holds these programs.
"""

Environment = dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]
"""Environment variables, with names that a shell can set."""


class Workspace(Record):
    """The files that the harness works on."""

    source: str | None = None
    """A directory on the gateway's machine: plain files, or a git repository at its base commit; null: an empty one."""
    path: InsidePath = "/workspace"
    """The workspace's directory inside the sandbox, which is the harness's working directory."""
    python_requirements: list[str] = Field(default_factory=list)
    """Requirements of a virtual environment that is built once, cached by hash, and mounted read-only."""
    base_patch: str = ""
    """A git patch that the base commit has and the image's repository lacks: a planted bug. A repository with such a
    patch has one commit and no history."""
    hidden_files: list[str] = Field(default_factory=list)
    """Files of the image's repository that are hidden from the harness; grading has them."""

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
    """`gateway`: the sandbox reaches the session's gateway and nothing else. `none`: nothing at all. `full`: the
    gateway and everything that the machine's network reaches. A sandbox for grading never gets the gateway."""
    scope: Literal["workspace", "container"] = "workspace"
    """`workspace`: the harness is a user without rights, and grading sees the diff of its workspace. `container`: the
    harness is root in a container of the image, whose git history is not cut, and grading sees a copy of all files that
    the harness left. Only docker can do that."""
    init_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time for the sandbox to come up, with its workspace and the harness inside."""


_TODAY = {"anyOf": [{"type": "string", "format": "date"}, {"const": "auto"}, {"type": "null"}], "default": None}


def _auto_today(value: Any) -> Any:
    return date.today() if value == "auto" else value


class HarnessSpec(PluginSpec):
    """Which harness runs, and how it is configured."""

    profile: Literal["default", "lean"] = "default"
    """`default` leaves the harness as its users run it; `lean` shortens prompts and tool lists for small models.
    `claude_code`, `codex` and `opencode` also ignore the repository's settings then."""
    model_name: str = "policy"
    """The name of the model that the harness is told; some harnesses choose their prompts by this name."""
    max_output_tokens: int = Field(default=16384, gt=0)
    """The size of one answer that the harness is told."""
    today: Annotated[date | None, BeforeValidator(_auto_today), WithJsonSchema(_TODAY)] = None
    """The date that the harness is told in every sample: a sample that starts after midnight then has the prompt of the
    others. `auto`: the day on which the request is made. null: the machine's. Codex and OpenCode cannot be told."""


class EvaluatorSpec(PluginSpec):
    """What a finished sandbox is worth."""

    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time for the evaluation, its fresh sandbox included."""


class BuilderSpec(PluginSpec):
    """How captured calls become traces."""

    train_on_sampling_mismatch: bool = False
    """Train also on calls whose distribution the harness or the engine changed (a forced tool, a grammar)."""
    train_rejected: bool = True
    """Train also on answers that the harness discarded to ask the same again: they are the policy's failures."""
    train_kinds: list[Kind] = ["main", "subagent", "compaction"]
    """The kinds of calls to train on. Others (`auxiliary`: titles, summaries for the screen) are excluded."""


class Sampling(Record):
    """The distribution that the policy samples from: every field is sent, so no engine or model default applies."""

    temperature: float = Field(default=1.0, ge=0)
    """1.0 is the model's own distribution, which training assumes."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that have this much probability together; 1.0 is off."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample only from so many of the likeliest tokens; -1 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample only from tokens with this share of the likeliest token's probability; 0.0 is off."""
    presence_penalty: float = 0.0
    """Penalty on tokens that were sampled before; 0.0 is off."""
    frequency_penalty: float = 0.0
    """Penalty on tokens that were sampled before, for each time; 0.0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the logits of tokens seen before, the prompt's included; 1.0 is off."""
    seed: int | None = None
    """Fixes the engine's seed of each call, which differs by task, sample and call, and in a branch also by
    the state that it starts from; null: the engine draws one."""

    @classmethod
    def shaping(cls, sampling: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields of a sampling, as it was sent, that make the distribution another one than the
        model's own. A missing field is one of them: the model's default may apply."""
        neutral = cls().model_dump(exclude={"seed", "top_k"})
        names = [name for name, value in neutral.items() if sampling.get(name) != value]
        return [*names, "top_k"] if sampling.get("top_k", -1) > 0 else names

    def of_call(self, task_id: str, sample_index: int, call: int, state: Sequence[int | None] = ()) -> Self:
        """Return the sampling of one call of a session, with a seed of its own: with one seed for all calls, the
        samples of a task would be the same session. `state`: of a branch, the state that it starts from
        (`Recording.state`): without it, a branch could be the same session as the one that it branched from."""
        if self.seed is None:
            return self
        name = repr((self.seed, task_id, sample_index, call, *state)).encode()
        return self.model_copy(update={"seed": int.from_bytes(blake2b(name, digest_size=4).digest()) >> 1})


class Budget(Record):
    """Limits that end a session early, with what was captured so far."""

    max_calls: int | None = Field(default=None, gt=0)
    """Model calls of one session, without those that the engine failed; null: no limit."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Tokens that one session may sample; null: no limit. Calls beside each other that may sample more together than is
    left wait for each other, in the order in which they came."""


class Retries(Record):
    """How often the rollout service tries one sample again."""

    node_death: int = Field(default=2, ge=0)
    """Tries after the sample's node died, or was restarted, while the session was under way there. A session that only
    waited there costs no try."""
    failure: int = Field(default=0, ge=0)
    """Tries after an infrastructure failure. Off by default: a failure may depend on the harness's actions, and to
    repeat such samples silently biases the task towards sessions that avoid those actions."""
    resume: bool = True
    """True: a try after a node's death goes on with the recorded calls of the dead session, where its node finds them.
    False: it begins again."""


class StartFrom(Record):
    """A recorded session, from which the first calls of a new one are answered."""

    record: str
    """The directory of the recorded session, with its `manifest.json` and `calls.jsonl`."""
    calls: int | None = Field(default=None, ge=0)
    """How many of the delivered calls are answered from the record, in their order; null: all."""
    owned: bool = False
    """True: the session goes on with its own record (resumed), and trains the recorded tokens. False: the session is
    branched, and the recorded tokens stay with the session that sampled them."""
    when_divergent: Literal["stop", "live"] = "stop"
    """The treatment of a request that the record has in another form. `stop`: the session ends. `live`: the engine
    answers the request."""


HARNESS_SECONDS = 1800.0
"""How long a harness may work on a task by default, in requests and in configs."""


class TaskRequest(Record):
    """One task, to be sampled `num_samples` times."""

    task_id: str = Field(min_length=1)
    instruction: str = Field(min_length=1)
    num_samples: int = Field(default=1, gt=0)
    timeout_seconds: float = Field(default=HARNESS_SECONDS, gt=0)
    """How long the harness may work, in seconds; init and evaluation have limits of their own."""
    runtime: RuntimeSpec
    agent: HarnessSpec
    builder: BuilderSpec = Field(default_factory=lambda: BuilderSpec(name="prefix_merging"))
    evaluator: EvaluatorSpec = Field(default_factory=lambda: EvaluatorSpec(name="session_completion"))
    sampling: Sampling = Field(default_factory=Sampling)
    budget: Budget = Field(default_factory=Budget)
    retries: Retries = Field(default_factory=Retries)
    stop_when_usable: int | None = Field(default=None, gt=0)
    """End the other samples as soon as so many are usable. Off by default: this biases the group towards short runs."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many weight versions a session may lie behind; null: any number."""
    when_stale: Literal["mark", "cancel"] = "mark"
    """Whether a session that lies further behind is marked or cancelled."""
    callback_url: str | None = None
    """The http or https URL that the rollout service posts each result to (`polar_gym.protocol.Callback`). It may lead
    to loopback only where the service listens on loopback, and never to a link-local address."""
    start_from: StartFrom | None = None
    """The record that the session starts from; null: the engine answers every call."""
    metadata: dict[str, Any] = Field(default_factory=dict)
