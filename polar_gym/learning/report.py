"""Shows a training run: a table with bars in the terminal, and a curve as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from polar_gym.console import table

BAR = 30
WIDTH, HEIGHT, MARGIN = 640, 320, 48

Line = dict[str, Any]


def evaluations(lines: Iterable[Line]) -> list[Line]:
    """Return the evaluations on held-out tasks at the training temperature."""
    return [line for line in lines if "evaluated" in line and not line["greedy"]]


def sentence(line: Line) -> str:
    """Return a line of a run for a person."""
    if "cold_start" in line:
        return f"the start model is made ({line['cold start_seconds']:.0f} s)"
    if "evaluated" in line:
        low, high = line["interval"]
        how = "greedy" if line["greedy"] else "sampled"
        return (
            f"after step {line['evaluated']}, {line['sessions']} held-out tasks, {how}: "
            f"mean reward {line['reward']:.3f} ({low:.3f} to {high:.3f})"
        )
    return (
        f"step {line['step']}: mean reward {line['reward']:.3f} of {line['sessions']} sessions, "
        f"{line['trained']} of {line['sampled']} tokens trained, {line['rollout_seconds']:.0f} s"
    )


def print_run(lines: Sequence[Line], console: Console) -> None:
    """Print each step's mean reward, and each evaluation with its 95 % interval."""
    shown = table("Mean reward", "step", "of", "reward", "95 %")
    shown.add_column("", justify="left")
    for heading in ("sessions", "masked", "cut off", "CPU s: sandboxes", "training", "rest"):
        shown.add_column(heading, justify="right")
    for line in lines:
        if "step" not in line and "evaluated" not in line:
            continue
        held_out = "evaluated" in line
        low, high = line["interval"]
        shown.add_row(
            str(line["evaluated" if held_out else "step"]),
            ("held out, greedy" if line["greedy"] else "held out") if held_out else "training",
            f"{line['reward']:.3f}",
            f"{low:.3f} to {high:.3f}" if held_out else "",
            Text("█" * round(line["reward"] * BAR), "green" if held_out else "blue"),
            *(str(line[name]) for name in ("sessions", "masked", "truncated")),
            *(f"{seconds:.0f}" for seconds in cpu(line)),
        )
    console.print(shown)


def cpu(line: Line) -> tuple[float, float, float]:
    """Return the CPU seconds of sandboxes (harness, git, grading), of training, and of the rest (sampling, gateway)."""
    sandboxes = sum(value for name, value in line.items() if name.endswith("_sandbox_cpu"))
    return sandboxes, line.get("training_cpu", 0.0), line.get("rollout_cpu", 0.0)


def curve(runs: Mapping[str, Sequence[Line]]) -> str:
    """Return an SVG of the held-out reward of runs by step, with 95 % intervals."""
    last = max((line["evaluated"] for lines in runs.values() for line in evaluations(lines)), default=1) or 1

    def at(step: float, reward: float) -> str:
        return (
            f"{MARGIN + step / last * (WIDTH - 2 * MARGIN):.1f},{HEIGHT - MARGIN - reward * (HEIGHT - 2 * MARGIN):.1f}"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-size="14">mean reward on held-out tasks</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">step of GRPO</text>',
    ]
    for tenth in range(0, 11, 2):
        x, y = at(0, tenth / 10).split(",")
        parts.append(f'<path d="M{at(0, tenth / 10)} L{at(last, tenth / 10)}" stroke="#ddd"/>')
        parts.append(f'<text x="{float(x) - 8}" y="{float(y) + 4}" text-anchor="end">{tenth * 10} %</text>')
    for step in sorted({0, last // 2, last}):
        x, y = at(step, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{step}</text>')
    for place, (name, lines) in enumerate(runs.items()):
        points = evaluations(lines)
        colour = f"hsl({place * 137 % 360} 60% 40%)"
        above = [at(line["evaluated"], line["interval"][1]) for line in points]
        below = [at(line["evaluated"], line["interval"][0]) for line in reversed(points)]
        parts.append(f'<polygon points="{" ".join(above + below)}" fill="{colour}" opacity="0.12"/>')
        path = " ".join(at(line["evaluated"], line["reward"]) for line in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{MARGIN + 8}" y="{60 + 16 * place}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
