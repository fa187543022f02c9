"""The options of the embedded engine, which its policies are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polar_gym.registry import Options
from polar_gym.schema import ReplayRecord

CONTEXT_LENGTH = 65_536
"""The context length where neither the options nor a model's config say one."""


class Script(BaseModel):
    """The commands for the conversations that `match` selects."""

    model_config = ConfigDict(extra="forbid")

    match: str = ""
    """Text that occurs in a user message. The longest match wins; the empty one matches every conversation."""
    commands: list[str] = Field(default_factory=list)
    """Shell commands, one for each turn, delivered as calls of the shell tool that the harness offers."""
    final_message: str = "Done."
    """The answer when the commands are used up, or when no tool is offered."""


class EmbeddedOptions(Options):
    policy: Literal["scripted", "transformers"] = "scripted"
    """A script, or a local causal language model."""
    model: str = "policy"
    """The name that the policy is served under."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length; default: what the model's own config says. 65536 for the scripted policy, and for a model whose
    config says none."""
    scripts: list[Script] | None = None
    """`policy=scripted`: the scripts to play; null: the reference solutions of the tasks."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """How long the scripted policy thinks before each answer."""
    model_path: Path | None = None
    """`policy=transformers`: a directory with a causal language model, its tokenizer and its chat template."""
    device: str | None = None
    """`policy=transformers`: a torch device; default: the first GPU, else the CPU."""
    dtype: str = "auto"
    """`policy=transformers`: a torch dtype; `auto` is the one that the weights are stored in."""
    record: list[ReplayRecord] = Field(default_factory=list)
    """`policy=transformers`: what each answer must hold beside ids and logprobs, for trainers that replay it:
    `routed_experts` (of a mixture-of-experts model), `sampling_mask`."""

    slots: int = Field(default=16, gt=0)
    """`policy=transformers`: how many answers are sampled at once. Each has a cache, which the next call of its
    conversation uses, too."""

    @model_validator(mode="after")
    def _a_model_is_recorded(self) -> Self:
        if self.record and self.policy == "scripted":
            raise ValueError(
                f"engine.record={self.record}: a script has no experts and no sampler; drop it, or set "
                "engine.policy=transformers"
            )
        return self

    @model_validator(mode="after")
    def _model_path_is_there(self) -> Self:
        if self.policy == "transformers" and self.model_path is None:
            raise ValueError("engine.policy=transformers needs engine.model_path, a directory with a model")
        if self.model_path is not None and not self.model_path.is_dir():
            raise ValueError(f"engine.model_path={self.model_path}: no such directory")
        return self
