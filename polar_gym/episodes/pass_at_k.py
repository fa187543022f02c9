"""pass@k: how likely one of k samples of a task passes, over tasks.

For a task with n scored samples, c of which pass, the unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", arXiv 2107.03374). pass@k is the mean of this estimate over the
tasks with n >= k.

The interval is Wilson's score interval (Wilson 1927, J. Am. Stat. Assoc. 22) with as many observations as tasks:
tasks are independent of each other, samples of one task are not. The interval is about other tasks of the same kind, so
more samples of the same tasks do not narrow it. Where the estimates of tasks lie between 0 and 1, the interval is too
wide rather than too narrow. It stays honest where every task passes; a bootstrap does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

from polar_gym.errors import ConfigError
from polar_gym.schema import Episode

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Tally:
    """How the samples of one task ended."""

    task_id: str
    repo: str
    scored: int
    passed: int
    masked: int
    """Samples without a reward, because the machinery failed. No estimate counts them."""
    truncated: int
    """Scored samples that a budget ended."""
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """pass@k with its interval; None where no task has k scored samples."""

    k: int
    value: float | None
    low: float | None
    high: float | None
    tasks: int
    """Tasks with at least k scored samples."""
    left_out: int
    """Tasks with fewer scored samples."""


def passed(episode: Episode) -> bool:
    """Return the evaluator's verdict on the sample; without a verdict, whether the reward is at least 1."""
    if episode.evaluation is not None and episode.evaluation.resolved is not None:
        return episode.evaluation.resolved
    return episode.reward is not None and episode.reward >= 1.0


def independent(episodes: Iterable[Episode]) -> list[Episode]:
    """Return the episodes that are no branches: branches share the beginning of the session that they began with."""
    return [episode for episode in episodes if episode.branch_point is None]


def check_one_agent(episodes: Iterable[Episode]) -> None:
    """Raise `ConfigError` where scored episodes have several harnesses, profiles, options of harnesses, models,
    weights, ways of sampling or limits, or those of one task several instructions, time limits or evaluators: they are
    no samples of one distribution, and pass@k would be that of a choice among them. Raise it, too, for two samples
    with the same seeds, which are one."""
    scored = [episode for episode in episodes if episode.reward is not None]
    tasks: dict[str, tuple[str, float, str]] = {}
    for episode in scored:
        request = episode.request
        task = (request.instruction, request.timeout_seconds, request.evaluator.name)
        if tasks.setdefault(request.task_id, task) != task:
            raise ConfigError(
                f"the episodes of task {request.task_id!r} have several instructions, time limits (timeout_seconds) or "
                "evaluators; pass@k is that of one task: keep their episodes in files of their own"
            )
    agents = {_agent(episode) for episode in scored}
    if len(agents) > 1:
        raise ConfigError(
            f"the episodes are of {len(agents)} agents: {'; '.join(sorted(agents))}; pass@k is that of one: keep their "
            "episodes in files of their own, and evaluate these one by one"
        )
    drawn: dict[tuple[str, int, int], str] = {}
    for episode in independent(scored):
        if (seed := episode.request.sampling.seed) is None:
            continue
        draw = (episode.request.task_id, episode.session.sample_index, seed)
        if (other := drawn.setdefault(draw, episode.session.session_id)) != episode.session.session_id:
            raise ConfigError(
                f"sessions {other} and {episode.session.session_id} are sample {draw[1]} of task {draw[0]!r} with "
                f"sampling.seed={seed}: they have the same seeds, and are one sample; keep one of their files"
            )


def _agent(episode: Episode) -> str:
    agent = episode.request.agent
    options = f" {json.dumps(agent.options, sort_keys=True, default=str)}" if agent.options else ""
    others = {
        **agent.model_dump(exclude_defaults=True, include={"model_name", "max_output_tokens"}),
        **episode.request.budget.model_dump(exclude_defaults=True),
        **episode.request.sampling.model_dump(exclude_defaults=True, exclude={"seed"}),
    }
    if episode.session.weight_version is not None:
        others["weight_version"] = episode.session.weight_version
    told = "".join(f" {name}={value}" for name, value in others.items())
    return f"harness={episode.session.harness}{options} profile={agent.profile} model={episode.engine.model}{told}"


def tally(episodes: Iterable[Episode]) -> list[Tally]:
    """Return one tally for each task, in the order in which the tasks first occur. The episodes are `independent`, and
    of one agent (`check_one_agent`)."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.session.task_id, []).append(episode)
    return [_tally(task_id, samples) for task_id, samples in by_task.items()]


def _tally(task_id: str, samples: Sequence[Episode]) -> Tally:
    scored = [episode for episode in samples if episode.reward is not None]
    rewards = [episode.reward for episode in scored if episode.reward is not None]
    return Tally(
        task_id=task_id,
        repo=str(samples[0].request.metadata.get("repo") or ""),
        scored=len(scored),
        passed=sum(map(passed, scored)),
        masked=len(samples) - len(scored),
        truncated=sum(episode.truncated for episode in scored),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def of_task(scored: int, passes: int, k: int) -> float:
    """Return the unbiased estimate for one task. Raises `ValueError` where it has fewer than k scored samples."""
    if not 1 <= k <= scored:
        raise ValueError(f"k={k}: expected 1 to {scored}, the number of scored samples")
    return 1 - comb(scored - passes, k) / comb(scored, k)


def pass_at_k(tallies: Sequence[Tally], k: int) -> Estimate:
    """Return the mean estimate over the tasks with at least k scored samples, and its interval."""
    values = [of_task(each.scored, each.passed, k) for each in tallies if each.scored >= k]
    mean = sum(values) / len(values) if values else None
    low, high = (None, None) if mean is None else wilson(mean, len(values))
    return Estimate(k=k, value=mean, low=low, high=high, tasks=len(values), left_out=len(tallies) - len(values))


def wilson(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share of `count` observations."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def usual_ks(tallies: Sequence[Tally]) -> list[int]:
    """Return 1, 2, 4, ... up to the largest number of samples of a task."""
    most = max((each.scored for each in tallies), default=0)
    return [2**power for power in range(most.bit_length())]
