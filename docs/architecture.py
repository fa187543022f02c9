"""Draw `architecture.svg`, the picture in ARCHITECTURE.md: `python docs/architecture.py > docs/architecture.svg`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1220, 640
LINE = 17
COLOURS = {"room": "#eef4ff", "process": "#fafafa", "outside": "#fff6e6"}


@dataclass(frozen=True, slots=True)
class Box:
    """A process, a room, or something outside of the package."""

    place: tuple[int, int, int, int]
    """x, y, width, height."""
    title: str
    lines: tuple[str, ...] = ()
    """Shown below the title."""
    kind: str = "room"

    def svg(self) -> str:
        x, y, width, height = self.place
        dashed = ' stroke-dasharray="5 4"' if self.kind == "process" else ""
        texts = [f'<text class="title" x="{x + 12}" y="{y + 22}">{escape(self.title)}</text>']
        for number, line in enumerate(self.lines, start=1):
            texts.append(f'<text x="{x + 12}" y="{y + 22 + number * LINE}">{escape(line)}</text>')
        shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLOURS[self.kind]}"{dashed}/>'
        return shape + "".join(texts)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A path through points, with its label beside the given place."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    both: bool = False

    def svg(self) -> str:
        path = " ".join(f"{x},{y}" for x, y in self.points)
        start = ' marker-start="url(#head)"' if self.both else ""
        lines = [f'<polyline points="{path}" marker-end="url(#head)"{start}/>']
        for number, line in enumerate(self.label.splitlines()):
            lines.append(f'<text class="label" x="{self.at[0]}" y="{self.at[1] + number * 15}">{escape(line)}</text>')
        return "".join(lines)


BOXES = [
    Box(
        (20, 20, 260, 70), "Trainer", ("NeMo RL, or another that reads", "episodes; it updates the weights"), "outside"
    ),
    Box((20, 150, 260, 52), "envs", ('gym.make("polar/swe"): reset, step',)),
    Box((20, 226, 260, 70), "nemo", ("NeMo Gym agent server: a row in,", "an answer with ids and reward out")),
    Box((20, 320, 260, 70), "runs", ("polar-gym rollout: a config, and its", "sweeps, on this machine")),
    Box((20, 414, 260, 70), "client", ("TaskRequests to a rollout server,", "episodes back")),
    Box(
        (20, 534, 260, 86),
        "service",
        ("polar-gym serve: tasks, samples,", "scheduling, retries, callbacks;", "nodes report by heartbeat"),
    ),
    Box((360, 44, 440, 576), "gateway/node: one process, many sessions", (), "process"),
    Box(
        (380, 82, 400, 104),
        "gateway/session",
        (
            "QUEUED > INIT > READY > RUN > POSTRUN > done",
            "INIT: sandbox, repository, harness",
            "RUN: the harness works until it ends or its time is up",
            "POSTRUN: traces are built, the diff is graded",
        ),
    ),
    Box(
        (380, 206, 400, 52),
        "harnesses, runtimes, workspaces",
        ("how a harness starts; sandboxes; repository and diff",),
    ),
    Box(
        (380, 278, 400, 122),
        "gateway/proxy",
        (
            "providers: a wire format <-> the chat form",
            "splicing: which known call a request continues;",
            "    its ids + the ids of the new messages",
            "engines: sample, with exact ids and logprobs",
            "journal: a call is on disk before its answer leaves",
        ),
    ),
    Box((380, 432, 400, 52), "builders", ("calls > traces (prefix_merging, per_request), fidelity",)),
    Box(
        (380, 536, 400, 70),
        "evaluators, tasks",
        ("the harness's diff in a fresh sandbox > reward;", "a node never grades in the sandbox of the run"),
    ),
    Box(
        (900, 82, 280, 104),
        "Sandbox",
        (
            "reaches one socket: its session's proxy.",
            "An unmodified harness: Codex, Claude",
            "Code, Gemini CLI, Qwen Code,",
            "OpenCode, Pi, a command, a function",
        ),
        "outside",
    ),
    Box(
        (900, 330, 280, 70),
        "Engine",
        ("vLLM, SGLang, or the embedded policy", "(scripted, or a local model on CPU)"),
        "outside",
    ),
    Box(
        (900, 536, 280, 70),
        "Grading sandbox",
        ("base commit + diff + hidden tests;", "the harness never ran in it"),
        "outside",
    ),
]

ARROWS = [
    Arrow(((280, 176), (360, 176)), both=True),
    Arrow(((280, 261), (360, 261)), both=True),
    Arrow(((280, 355), (360, 355)), "Episode", (296, 347), both=True),
    Arrow(((150, 484), (150, 534)), "HTTP", (158, 514), both=True),
    Arrow(((280, 577), (360, 577)), "HTTP", (304, 569), both=True),
    Arrow(((150, 150), (150, 90)), "trajectory, reward", (158, 124)),
    Arrow(((780, 134), (900, 134)), "start, stop", (806, 126)),
    Arrow(((1035, 186), (1035, 300), (780, 300)), "model calls, in the\nharness's wire format", (1043, 240), both=True),
    Arrow(((780, 365), (900, 365)), "ids, logprobs", (806, 357), both=True),
    Arrow(((580, 400), (580, 432)), "calls", (588, 421)),
    Arrow(((780, 571), (900, 571)), "diff, tests", (806, 563), both=True),
    Arrow(((280, 30), (1200, 30), (1200, 365), (1180, 365)), "weights", (1130, 24)),
]


def svg() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<style>text{font-size:13px;fill:#222}.title{font-weight:bold;font-size:14px}.label{font-size:12px;fill:#555}"
        "rect{stroke:#667}polyline{fill:none;stroke:#445;stroke-width:1.5}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#445"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white" style="stroke:none"/>',
        *(box.svg() for box in BOXES),
        *(arrow.svg() for arrow in ARROWS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(svg())
