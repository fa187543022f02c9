"""The checked form of a run's config.

The docstrings of the fields are the descriptions in `polar-gym rollout --help`. A default is said once, here or in
`polar_gym.schema`: `conf/config.yaml` begins with `field_defaults`, and the files of `conf/` say only what differs.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from polar_gym.paths import NamedPath
from polar_gym.record import Record
from polar_gym.schema import (
    HARNESS_SECONDS,
    Budget,
    BuilderSpec,
    EvaluatorSpec,
    HarnessSpec,
    PluginSpec,
    RuntimeSpec,
    Sampling,
    TaskRequest,
)
from polar_gym.spans import Spans
from polar_gym.tracking import Where


class RolloutConfig(Record):
    """How much is run, and where its episodes go."""

    num_samples: int = Field(default=1, gt=0)
    """Sessions for each task."""
    timeout_seconds: float = Field(default=HARNESS_SECONDS, gt=0)
    """How long the harness may work on a task, in seconds; init and evaluation have limits of their own."""
    output: NamedPath = Path("outputs/episodes.jsonl")
    """The file of episodes, one a line. An earlier run's file is kept under another name. In a sweep, a relative path
    is in each run's own directory."""
    state: NamedPath | None = None
    """The directory of journals of captured calls, which belongs to one output; null: `episodes.state` for the output
    `episodes.jsonl`, or for gym.make a temporary folder."""
    metrics: Where = "none"
    """The tracker that gets the figures of `polar-gym rollout` and `polar-gym learn`. Clients read the environment."""
    spans: Spans = "none"
    """`otel`: OpenTelemetry spans of sessions and calls. `OTEL_EXPORTER_OTLP_ENDPOINT` names the collector."""


class Pools(Record):
    """How many sessions may be in each stage at once."""

    init: int = Field(default=2, gt=0)
    """Sandboxes that come up."""
    ready: int = Field(default=4, gt=0)
    """Sandboxes that wait for their harness to start."""
    run: int = Field(default=4, gt=0)
    """Harnesses that run."""
    postrun: int = Field(default=2, gt=0)
    """Sessions whose traces are built and whose sandbox is evaluated."""
    prewarm: int = Field(default=2, ge=0)
    """Sandboxes for grading that come up, or are up, while the harness runs; 0: none."""


def _off(value: Any) -> Any:
    """Return `off` for False, which is how YAML reads the bare word."""
    return "off" if value is False else value


class FrozenConfig(Record):
    """A second engine, whose weights no trainer changes, for some kinds of calls. None of its tokens is trained on."""

    engine: PluginSpec
    kinds: list[Literal["auxiliary", "subagent", "compaction", "judge"]] = Field(default=["auxiliary"], min_length=1)


class ProxyConfig(Record):
    """How the gateway answers the harness and asks the engine."""

    streaming: Literal["synthetic", "real"] = "synthetic"
    """What a harness gets that asks for a stream: the whole answer at its end, or its pieces as they are sampled."""
    splice: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = "auto"
    """`auto`: a continuation's prompt is the ids already seen plus the new ones. `off`: the engine templates every
    prompt, as the model will be served, and traces fork where that differs."""
    keep_reasoning: bool = True
    """Whether sampled reasoning stays in the context; else the template decides, and every drop forks the trace."""
    frozen: FrozenConfig | None = None
    """null: the policy answers every call."""


class ScoringConfig(Record):
    """The check of logprobs while sessions run: the engine computes those of some calls again."""

    share: float | None = Field(default=0.01, ge=0, le=1)
    """What this may cost, as a share of the prompts' new tokens. The first call after the start and after each weight
    update is scored in any case. null: no call is scored."""
    longest: int = Field(default=2048, gt=0)
    """Calls of more tokens, prompt and answer, are not scored: vLLM needs memory for the logits of all of them, and
    dies where that memory is missing."""
    mask_above: float = Field(default=0.2, gt=0)
    """The mean |difference| of a call's logprobs, in nats, above which the call's episode is masked."""
    reference: PluginSpec | None = None
    """A second engine that scores the same calls: the trainer's weights. Pause generation while they change."""


class RunConfig(Record):
    """The config of a whole run."""

    harness: HarnessSpec
    runtime: RuntimeSpec
    engine: PluginSpec
    """The server or library that samples the tokens."""
    builder: BuilderSpec
    evaluator: EvaluatorSpec
    tasks: PluginSpec
    """The source of the tasks."""
    sampling: Sampling = Field(default_factory=Sampling)
    budget: Budget = Field(default_factory=Budget)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    pools: Pools = Field(default_factory=Pools)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)

    @property
    def engine_keys(self) -> list[str | None]:
        """Return the API keys of the engines; None for an engine without a key."""
        specs = (self.engine, self.scoring.reference, self.proxy.frozen and self.proxy.frozen.engine)
        return [spec.options.get("api_key") for spec in specs if spec is not None]

    @property
    def names(self) -> dict[str, str]:
        """Return the name of each plug-in of the run."""
        keys = ("harness", "runtime", "engine", "builder", "evaluator", "tasks")
        return {key: getattr(self, key).name for key in keys}

    def with_rollout(self, **changes: Any) -> RunConfig:
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=changes)})

    def on(self, day: date | None) -> RunConfig:
        """Return the config of a run that goes on and began on this day, where harnesses are told a date."""
        if day is None or self.harness.today is None:
            return self
        return self.model_copy(update={"harness": self.harness.model_copy(update={"today": day})})

    def request(self, task_id: str, instruction: str) -> TaskRequest:
        """Return the request for a task, without the parts that a row may bring. Raises `pydantic.ValidationError`."""
        return TaskRequest(
            task_id=task_id,
            instruction=instruction,
            num_samples=self.rollout.num_samples,
            timeout_seconds=self.rollout.timeout_seconds,
            runtime=self.runtime,
            agent=self.harness,
            builder=self.builder,
            evaluator=self.evaluator,
            sampling=self.sampling,
            budget=self.budget,
        )


def field_defaults() -> dict[str, Any]:
    """Return the defaults of every section and group, as the config `field_defaults` of Hydra.

    Left out are the keys whose meaning depends on the choice of the group, whose file names them.
    """
    own = {"today", "image", "workspace"}
    return {
        name: field.annotation.model_construct().model_dump(mode="json", exclude=own)
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
