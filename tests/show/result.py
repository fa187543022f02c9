"""The common part of the programs of this folder: their options, their results file and their exit status."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_gym import __version__
from polar_gym.console import make_console

RESULTS = Path("build/show")
HARNESSES = ("codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "pi", "mini_swe_agent", "mistral_vibe")
"""The agent CLIs, in the order of the tables."""
OF_NPM = HARNESSES[:6]
"""Those for which the cases of `exact` and `forest` were made, and that take tools over MCP in `gym`."""
SHOWN_BREACHES = 50
"""The most breaches that are printed. The results file holds all of them."""
NOT_CHECKED = "the program ended without checking this law"


def make_parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every program; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(prog=f"make show-{name}", description=description)
    parser.add_argument("--quick", action="store_true", help=f"take about a minute or less; leaves out: {quick}")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / f"{name}.json", help="the results file (default: %(default)s)"
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, quick: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """Return the options. With `--quick`, the values of `quick` take the place of the parser's defaults."""
    defaults = vars(parser.parse_args([]))
    options = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults))))
    given = {name: value for name, value in options.items() if value is not None}
    return argparse.Namespace(**defaults | (dict(quick or {}) if given.get("quick") else {}) | given)


class Result:
    """What a program found: its figures, and the breaches of each of its laws."""

    def __init__(self, name: str, laws: Sequence[str], options: argparse.Namespace) -> None:
        """Remove the results of an earlier run, so that a program that crashes leaves none."""
        self.name = name
        self.laws = laws
        self.options = options
        self.figures: dict[str, Any] = {}
        self._breaches: dict[str, list[str]] = {}
        self._begun = time.monotonic()
        self.path.unlink(missing_ok=True)

    @property
    def path(self) -> Path:
        return self.options.results

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begun, 1)

    @property
    def breaches(self) -> dict[str, list[str]]:
        """The breaches of each law. A law that was never checked does not hold."""
        return {law: self._breaches.get(law, [NOT_CHECKED]) for law in self.laws}

    def check(self, law: str, breaches: Iterable[str]) -> None:
        """Add these breaches, which may be none, to those of the law."""
        if law not in self.laws:
            raise ValueError(f"law={law!r}: {self.name} states no such law; add it to its LAWS")
        self._breaches.setdefault(law, []).extend(breaches)

    def finish(self) -> int:
        """Write the results file, print the breaches and return the exit status: 0 only if every law held."""
        broken = [f"{law}: {breach}" for law, breaches in self.breaches.items() for breach in breaches]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._record(), indent=2, default=str) + "\n", encoding="utf-8")
        console = make_console()
        for line in broken[:SHOWN_BREACHES]:
            console.print(line, style="red", markup=False, highlight=False)
        held = sum(not breaches for breaches in self.breaches.values())
        console.print(f"{held} of {len(self.laws)} laws held; {len(broken)} breaches; results in {self.path}")
        return 1 if broken else 0

    def _record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "quick": self.options.quick,
            "options": vars(self.options),
            "figures": self.figures,
            "laws": {law: not breaches for law, breaches in self.breaches.items()},
            "breaches": {law: breaches for law, breaches in self.breaches.items() if breaches},
            "seconds": self.seconds,
            "polar_gym": __version__,
            "machine": machine(),
        }


def machine() -> dict[str, Any]:
    """Return the parts of this machine that figures depend on."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
