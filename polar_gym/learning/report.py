"""Shows a training run: a table with bars in the terminal, and a curve as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

from rich.console import Console
from rich.text import Text

from polar_gym.console import table
from polar_gym.episodes.pass_at_k import CONFIDENCE, wilson
from polar_gym.errors import ConfigError, shortened
from polar_gym.schema import Episode
from polar_gym.training.batch import regarded

BAR = 30
WIDTH, HEIGHT, MARGIN = 640, 320, 48

Line = dict[str, Any]


def figures(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the figures of some episodes, of which `check_scored`. A masked episode is in no mean, and one that a
    budget ended has 0."""
    found = [(episode.session.task_id, regarded(episode, "zero").reward) for episode in episodes]
    rewards: dict[str, list[float]] = {}
    for task_id, reward in found:
        if reward is not None:
            rewards.setdefault(task_id, []).append(reward)
    return {
        "sessions": len(episodes),
        "tasks": len({task_id for task_id, _ in found}),
        "masked": sum(reward is None for _, reward in found),
        "failures": failures(episodes),
        "truncated": sum(episode.truncated and episode.reward is not None for episode in episodes),
        "reward": fmean(reward for own in rewards.values() for reward in own),
        "interval": interval(list(rewards.values())),
        "sampled": sum(episode.trajectory.fidelity.sampled_tokens for episode in episodes),
        "run_seconds": round(sum(episode.session.timing.running or 0.0 for episode in episodes), 2),
    }


def failures(episodes: Iterable[Episode]) -> str:
    """Return why those of the episodes that have no reward have none: the number of each kind, and a message of the
    most common one."""
    failed = [episode.session.failure for episode in episodes if episode.reward is None]
    reasons = [("no reward", "") if each is None else (each.kind, each.message) for each in failed]
    kinds = Counter(kind for kind, _ in reasons).most_common()
    told = ", ".join(f"{count} x {kind}" for kind, count in kinds)
    message = next((message for kind, message in reasons if kind == kinds[0][0]), "")
    return f"{told}, e.g. {shortened(message)}" if message else told


def check_scored(episodes: Sequence[Episode], where: object) -> None:
    """Raise `ConfigError` where no episode of a harness has a reward: a mean of none would be shown as one of 0, and
    that of the other harnesses as one of all. `where` names the episodes in the message."""
    for harness in dict.fromkeys(episode.session.harness for episode in episodes):
        own = [episode for episode in episodes if episode.session.harness == harness]
        if all(episode.reward is None for episode in own):
            raise ConfigError(
                f"{where}: none of {len(own)} sessions of {harness} has a reward ({failures(own)}); mend the cause and "
                "run the same command again"
            )


def interval(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of rewards, given as those of each task. It has as many observations as
    tasks, as that of `episodes.pass_at_k`: sessions of one task are not independent. Wilson's where all rewards lie in
    [0, 1], else the normal one of the tasks' means. A single task outside of [0, 1] tells no spread: both ends are its
    mean."""
    every = [reward for own in rewards for reward in own]
    mean = fmean(every)
    if min(every) >= 0 and max(every) <= 1:
        return wilson(mean, len(rewards))
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    reach = z * stdev(map(fmean, rewards)) / sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return mean - reach, mean + reach


def evaluations(lines: Iterable[Line]) -> list[Line]:
    """Return the evaluations on held-out tasks at the training temperature, in the run's first harness."""
    return [line for line in lines if "evaluated" in line and not line["greedy"] and "harness" not in line]


def sentence(line: Line) -> str:
    """Return a line of a run for a person."""
    if "cold_start" in line:
        return f"the start model is made ({line['cold_start_seconds']:.0f} s)"
    failed = f" ({line['masked']} without a reward, in no mean: {line['failures']})" if line["masked"] else ""
    failed += f" ({line['truncated']} ended by a budget, with reward 0)" if line["truncated"] else ""
    if "evaluated" in line:
        low, high = line["interval"]
        how = "greedy" if line["greedy"] else "sampled"
        where = f" in {line['harness']}" if "harness" in line else ""
        sessions = f"{line['sessions']} sessions of " if line["sessions"] > line["tasks"] else ""
        return (
            f"after step {line['evaluated']}, {sessions}{line['tasks']} held-out tasks{where}, {how}{failed}: "
            f"mean reward {line['reward']:.3f} ({low:.3f} to {high:.3f})"
        )
    return (
        f"step {line['step']}: mean reward {line['reward']:.3f} of {line['sessions']} sessions{failed}, "
        f"{line['trained']} of {line['sampled']} tokens trained, {line['rollout_seconds']:.0f} s"
    )


LABELS = ("step", "evaluated", "greedy", "harness", "cold_start")


def tracked_line(line: Line) -> tuple[Line, int]:
    """Return the figures of a line of a run, named after the line's kind, and the step that they are of."""
    if "evaluated" in line:
        kind = "/".join(filter(None, ("held_out", line.get("harness"), "greedy" if line["greedy"] else "")))
    else:
        kind = "training" if "step" in line else "cold_start"
    named = {name: value for name, value in line.items() if name not in LABELS}
    step = line.get("step", line.get("evaluated", 0))
    return {f"{kind}/{name}": value for name, value in named.items()}, step


def print_run(lines: Sequence[Line], console: Console) -> None:
    """Print each step's mean reward, and each evaluation with its 95 % interval."""
    shown = table("Mean reward", "step", "of", "reward", "95 %")
    shown.add_column("", justify="left")
    for heading in ("sessions", "masked", "cut off", "CPU s: sandboxes", "sampling", "training", "rest"):
        shown.add_column(heading, justify="right")
    told = [line for line in lines if "step" in line or "evaluated" in line]
    least, most = _axis(line["reward"] for line in told)
    for line in told:
        held_out = "evaluated" in line
        low, high = line["interval"]
        shown.add_row(
            str(line["evaluated" if held_out else "step"]),
            _kind(line) if held_out else "training",
            f"{line['reward']:.3f}",
            f"{low:.3f} to {high:.3f}" if held_out else "",
            Text("█" * round((line["reward"] - least) / (most - least) * BAR), "green" if held_out else "blue"),
            *(str(line[name]) for name in ("sessions", "masked", "truncated")),
            *(f"{seconds:.0f}" for seconds in cpu(line)),
        )
    console.print(shown)


def _axis(rewards: Iterable[float]) -> tuple[float, float]:
    """Return the ends of an axis with these rewards, and at least from 0 to 1."""
    values = 0.0, 1.0, *rewards
    return min(values), max(values)


def cpu(line: Line) -> tuple[float, float, float, float]:
    """Return the CPU seconds of sandboxes (harness, git, grading; on a machine with no other work), of sampling, of
    training, and of the rest, which is the gateway and the environment. Where sessions run during an update, what the
    gateway takes then counts as training."""

    def total(kind: str) -> float:
        return sum(line.get(f"{part}_{kind}", 0.0) for part in ("rollout", "training"))

    sampling = total("sampling_cpu")
    training = line.get("training_cpu", 0.0) - line.get("training_sampling_cpu", 0.0)
    return total("machine_cpu") - total("cpu"), sampling, training, total("cpu") - sampling - training


def _kind(line: Line) -> str:
    return ", ".join(filter(None, ("held out", line.get("harness"), "greedy" if line["greedy"] else "")))


def curve(runs: Mapping[str, Sequence[Line]], *, by_time: bool = False) -> str:
    """Return an SVG of the held-out reward of runs, with 95 % intervals, by step or by the minutes of the steps."""
    points = {name: _points(lines, by_time) for name, lines in runs.items()}
    last = max((x for own in points.values() for x, _ in own), default=1) or 1
    least, most = _axis(end for own in points.values() for _, line in own for end in line["interval"])
    names_at = WIDTH - MARGIN + 16
    whole = max(WIDTH, names_at + 8 * max(map(len, runs), default=0))

    def at(x: float, reward: float) -> str:
        height = (reward - least) / (most - least) * (HEIGHT - 2 * MARGIN)
        return f"{MARGIN + x / last * (WIDTH - 2 * MARGIN):.1f},{HEIGHT - MARGIN - height:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{whole}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-size="14">mean reward on held-out tasks</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        f"{'minutes of sessions and updates' if by_time else 'step of GRPO'}</text>",
    ]
    for tenth in range(0, 11, 2):
        reward = least + (most - least) * tenth / 10
        x, y = at(0, reward).split(",")
        parts.append(f'<path d="M{at(0, reward)} L{at(last, reward)}" stroke="#ddd"/>')
        parts.append(f'<text x="{float(x) - 8}" y="{float(y) + 4}" text-anchor="end">{reward * 100:.0f} %</text>')
    for mark in sorted({0, int(last) // 2, int(last)}):
        x, y = at(mark, least).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{mark}</text>')
    for place, (name, own) in enumerate(points.items()):
        colour = f"hsl({place * 137 % 360} 60% 40%)"
        above = [at(x, line["interval"][1]) for x, line in own]
        below = [at(x, line["interval"][0]) for x, line in reversed(own)]
        parts.append(f'<polygon points="{" ".join(above + below)}" fill="{colour}" opacity="0.12"/>')
        path = " ".join(at(x, line["reward"]) for x, line in own)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{names_at}" y="{MARGIN + 4 + 16 * place}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _points(lines: Sequence[Line], by_time: bool) -> list[tuple[float, Line]]:
    """Return the place of each evaluation on the horizontal axis, and its line."""
    if not by_time:
        return [(line["evaluated"], line) for line in evaluations(lines)]
    minutes, points = 0.0, []
    for line in lines:
        if "step" in line:
            minutes += (line["rollout_seconds"] + line["training_seconds"]) / 60
        points += [(minutes, each) for each in evaluations([line])]
    return points
