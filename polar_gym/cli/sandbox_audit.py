"""`polar-gym doctor --sandbox`: which guarantees the sandboxes of each runtime keep on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from polar_gym.console import console, table
from polar_gym.errors import ConfigError, explain
from polar_gym.registry import UnknownNameError
from polar_gym.runtimes import RUNTIMES, SandboxError
from polar_gym.runtimes.audit import GUARANTEES, Finding, audit, make, worse_than_docker
from polar_gym.runtimes.limits import LimitOptions

STYLES = {"holds": "green", "lower": "yellow", "fails": "bold red"}


def audit_sandboxes(names: Sequence[str]) -> None:
    """Probe real sandboxes of these runtimes, by default of all usable ones, and print what holds.

    Exits with 1 where a guarantee fails that Docker's default holds. Raises `ConfigError` where no runtime can be
    probed, or not all that were named.
    """
    findings: dict[str, Mapping[str, Finding]] = {}
    broken = []
    try:
        runtimes = {
            name: make(name) for name in names or sorted({*RUNTIMES.names()} - {"auto", "remote", "unconfined"})
        }
    except UnknownNameError as error:
        raise ConfigError(f"--runtime: {error}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, LimitOptions, "runtime")) from error
    for name, runtime in runtimes.items():
        try:
            findings[name] = asyncio.run(audit(runtime))
        except SandboxError as error:
            broken.append(f"runtime={name} cannot be probed: {error}")
    if findings:
        console.print(render(findings))
    if broken and (names or not findings):
        raise ConfigError("; ".join(broken))
    for each in broken:
        console.print(each, markup=False)
    if any(worse_than_docker(each) for each in findings.values()):
        raise typer.Exit(1)


def render(findings: Mapping[str, Mapping[str, Finding]]) -> Table:
    worse = [f"{name}: {guarantee.name}" for name, each in findings.items() for guarantee in worse_than_docker(each)]
    verdict = f"Worse than Docker's default: {', '.join(worse) or 'nothing'}"
    shown = table("polar-gym doctor --sandbox", "guarantee", *findings, "Docker's default", justify="left")
    shown.caption, shown.caption_justify = verdict, "left"
    for guarantee in GUARANTEES:
        found = [*(each[guarantee.name] for each in findings.values()), guarantee.docker]
        cells = [Text.assemble((each.verdict, STYLES[each.verdict]), " ", each.found) for each in found]
        shown.add_row(Text.assemble(guarantee.name, (f"\n{guarantee.why}", "dim")), *cells)
    return shown
