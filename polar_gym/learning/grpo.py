"""A GRPO loop over a harness, as small as one can be: an example to read, and the trainer of `polar-gym learn`.

episodes = roll_out(...)                 # real sessions of an unmodified harness, through gymnasium
batch = make_batch(episodes)             # every trace of every session, with advantages and weights
update(...)                              # the clipped policy gradient on the captured logprobs
envs.set_weights(...)                    # the engine samples the next step with the new weights
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.schema import Episode
from polar_gym.training import Batch, Row, make_batch, padded, to_torch
from polar_gym.training.tensors import token_advantages, version_names

Part = dict[str, Any]
"""Some rows as torch tensors: see `polar_gym.training.padded`."""
MakeRows = Callable[[Sequence[Episode]], Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of a step, and the step itself."""

    groups: int = 8
    """Tasks of a step."""
    samples: int = 8
    """Sessions of a task: a group."""
    learning_rate: float = 2e-4
    """At the first step. It falls evenly, towards a tenth of this after the last one."""
    epochs: int = 2
    """Passes over the rows of a step."""
    rows_at_once: int = 16
    clip_below: float = 0.2
    clip_above: float = 0.28
    truncate: float = 2.0
    """The largest importance weight of a token: probability under the weights before the step over that under those
    which sampled the token."""
    tolerance: float = 0.01
    """The largest difference, in nats, between the trainer's logprob of a token and the engine's, where both have the
    same weights. A larger one stops the run: engine and trainer are not the same model."""


class LogprobsDifferError(RuntimeError):
    """The engine's logprobs are not those of the trainer's weights."""


class GradientError(RuntimeError):
    """The norm of the gradient is not a finite number."""


def roll_out(
    envs: Any, task_ids: Sequence[str], action: dict[str, Any], samples: Sequence[int] | None = None
) -> Iterator[Episode]:
    """Yield an episode for each id, as many at once as the vector environment has places. `samples`: a sample index for
    each id; None: the environment counts."""
    for start in range(0, len(task_ids), envs.num_envs):
        ids = list(task_ids[start : start + envs.num_envs])
        idle = envs.num_envs - len(ids)
        mask = np.arange(envs.num_envs) < len(ids)
        indices = [None] * len(ids) if samples is None else samples[start : start + len(ids)]
        options = {"task_id": ids + ids[:1] * idle, "sample_index": [*indices, *[None] * idle], "reset_mask": mask}
        envs.reset(options=options)
        *_, infos = envs.step([action] * len(ids) + [None] * idle)
        yield from infos["trajectory"][: len(ids)]


def choose(task_ids: Sequence[str], settings: Settings, seed: int, step: int) -> list[str]:
    """Return the task ids of a step, one for each session: every task once before one comes again."""
    chosen = []
    for place in range(step * settings.groups, (step + 1) * settings.groups):
        rounds, number = divmod(place, len(task_ids))
        order = random.Random(f"{seed} {rounds}").sample(task_ids, len(task_ids))
        chosen.append(order[number])
    return [task_id for task_id in chosen for _ in range(settings.samples)]


def rows_of(episodes: Sequence[Episode]) -> Batch:
    """Return the rows of a step. A session that a budget ended has the reward 0: it must learn to end by itself.

    Groups whose sessions all have one reward keep their weight, and differences of rewards are not scaled: so the
    update becomes small when little is left to learn. Without both, a policy that was right went on to change. All
    sessions have the same weight: by tokens, one that repeats itself up to its budget would outweigh ten others.
    """
    return make_batch(episodes, scale="none", zero_variance="keep", truncated="zero", weighting="session")


class Trainer:
    """A model, its optimizer, and GRPO's update."""

    def __init__(self, model: Any, settings: Settings, pad_id: int) -> None:
        self.model = model
        self._torch: Any = importlib.import_module("torch")
        self.optimizer = self._torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self._settings, self._pad_id = settings, pad_id
        self._moved: list[tuple[float, float, float]] = []
        """Of each part of an epoch: trained tokens, and the sums of their ratios and of their KL estimates."""

    def update(self, rows: Sequence[Row], version: str, progress: float) -> dict[str, float]:
        """Take the optimizer's steps on the rows. `version` names the weights that the model has; `progress` is the
        share of the run that is over. Return the figures of the step: `ratio` and `kl` are means over trained tokens
        at the last epoch, between the weights before the step and those that the epoch began with; `compared` tokens
        were sampled by these weights, and have a `logprob_difference`. Raises `LogprobsDifferError` and
        `GradientError`."""
        if not any(token_advantages(row).any() for row in rows):  # else momentum alone would change the weights
            return {"rows": len(rows), "loss": 0.0}
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * (1 - 0.9 * progress)
        size = self._settings.rows_at_once
        together = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = [self.arrays(some) for some in together]
        before = self.logprobs(parts)
        names = map(version_names, together)
        compared = [_differences(*each, version) for each in zip(parts, before, names, strict=True)]
        differences = np.concatenate(compared)
        difference = float(differences.max(initial=0.0))  # NaN if one is, unlike Python's `max`
        if not difference <= self._settings.tolerance:
            raise LogprobsDifferError(
                f"version {version}: the engine's logprobs differ from the trainer's by up to {difference:.3g} nats, "
                f"more than {self._settings.tolerance:g}: the engine does not sample with the trainer's weights"
            )
        losses = []
        for epoch in range(self._settings.epochs):
            self._moved.clear()
            self.optimizer.zero_grad()
            losses.append(self.accumulate(parts, before))
            norm = float(self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            if not math.isfinite(norm):
                raise GradientError(
                    f"version {version}, epoch {epoch + 1}: the norm of the gradient is {norm}, which would spoil the "
                    "weights; look for very large rewards, or lower the learning rate"
                )
            self.optimizer.step()
        tokens, ratio, kl = (sum(each) for each in zip(*self._moved, strict=True))
        moved = {"ratio": ratio / max(1, tokens), "kl": kl / max(1, tokens)}
        return {
            "rows": len(rows),
            "loss": losses[0],
            "compared": len(differences),
            **({"logprob_difference": difference} if len(differences) else {}),
            **moved,
        }

    def arrays(self, rows: Sequence[Row]) -> Part:
        """Return rows as tensors on the model's device."""
        device = self.model.device
        return {name: tensor.to(device) for name, tensor in to_torch(padded(rows, self._pad_id)).items()}

    def logprobs(self, parts: Sequence[Part]) -> list[Any]:
        """Return the logprobs of the tokens of each part, without a gradient."""
        with self._torch.no_grad():
            return [self._logprobs(part) for part in parts]

    def accumulate(self, parts: Sequence[Part], before: Sequence[Any]) -> float:
        """Add the gradient of the loss over all parts, and return the loss. `before`: logprobs before the step."""
        total = 0.0
        for part, old in zip(parts, before, strict=True):
            loss = self._loss(part, old)
            loss.backward()
            total += float(loss.detach())
        return total

    def _loss(self, part: Part, old: Any) -> Any:
        """PPO's clipped loss (arXiv:1707.06347) with DAPO's two bounds (arXiv:2503.14476), each token weighted by its
        truncated importance (https://fengyao.notion.site/off-policy-rl)."""
        torch, settings = self._torch, self._settings
        ratio = (self._logprobs(part) - old).exp()
        importance = (old - part["old_logprobs"][:, 1:]).exp().clamp(max=settings.truncate)
        advantages = part["advantages"][:, 1:]
        clipped = ratio.clamp(1 - settings.clip_below, 1 + settings.clip_above)
        with torch.no_grad():  # KL: the estimator k3 of http://joschu.net/blog/kl-approx.html
            trained = part["loss_mask"][:, 1:]
            sums = trained, ratio * trained, (ratio - 1 - ratio.log()) * trained
            self._moved.append((float(sums[0].sum()), float(sums[1].sum()), float(sums[2].sum())))
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        return -(part["weights"][:, 1:] * importance * gain).sum()

    def _logprobs(self, part: Part) -> Any:
        """Return the logprob of each token but the first, shape (rows, length - 1)."""
        logits = self.model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(-1, part["input_ids"][:, 1:, None])[..., 0]


def _differences(part: Part, own: Any, versions: Sequence[str], version: str) -> NDArray[np.float32]:
    """Return the differences of the logprobs of the trained tokens that `version` sampled."""
    if version not in versions:
        return np.empty(0, np.float32)
    compared = (part["loss_mask"] == 1) & (part["weight_versions"] == versions.index(version))
    return (own - part["old_logprobs"][:, 1:]).abs()[compared[:, 1:]].cpu().numpy()
