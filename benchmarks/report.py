"""Writes the measurements as one Markdown page with its plots beside it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("polar-gym", "aiohttp", "orjson", "numpy", "pydantic")
Figure = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Figure]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [" | ".join(self.columns), " | ".join("---" for _ in self.columns)]
        lines += [" | ".join(map(shown, row)) for row in self.rows]
        body = "\n".join(f"| {line} |" for line in lines)
        return f"{self.caption}\n\n{body}\n" if self.caption else f"{body}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A claim and its measurement."""

    claim: str
    measured: str
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves of y over x, as a PNG."""

    name: str
    title: str
    x: str
    y: str
    curves: dict[str, Sequence[tuple[float, float]]]
    logarithmic: bool = False

    def save(self, folder: Path) -> bool:
        """Draw the plot. Return False where matplotlib is not installed (extra `bench`)."""
        if find_spec("matplotlib") is None:
            return False
        drawing = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
        axes = drawing.subplots()
        for name, points in self.curves.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        if self.logarithmic:
            axes.set(xscale="log", yscale="log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        drawing.savefig(folder / f"{self.name}.png", dpi=120)
        return True


@dataclass(kw_only=True)
class Section:
    title: str
    text: str
    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def markdown(self, folder: Path) -> str:
        pictures = [f"![{plot.title}]({plot.name}.png)\n" for plot in self.plots if plot.save(folder)]
        return "\n".join(
            [f"## {self.title}\n", f"{self.text}\n", *(each.markdown() for each in self.tables), *pictures]
        )


Benchmark = Callable[[bool], Section]
"""Makes a section of the report; the argument says whether to be quick."""


def shown(figure: Figure) -> str:
    if figure is None:
        return "-"
    if isinstance(figure, float):
        return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"
    return f"{figure:,}" if isinstance(figure, int) else figure


def machine() -> str:
    """Return a description of the machine, and how busy the machine was."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cpu}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}; "
        f"load average {load:.1f} when the report was written."
    )


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) + "."


def write(sections: Sequence[Section], page: Path, command: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    goals = [(goal.claim, goal.measured, "yes" if goal.held else "**no**") for each in sections for goal in each.goals]
    head = [
        "# Benchmarks of polar-gym\n",
        f"`{command}`, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.\n",
        f"{machine()}\n",
        f"{versions()}\n",
        Table(columns=("claim", "measured", "holds"), rows=goals).markdown() if goals else "",
    ]
    page.write_text("\n".join([*head, *(each.markdown(page.parent) for each in sections)]), encoding="utf-8")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
