"""`polar-gym doctor --sandbox`: which guarantees the sandboxes of each runtime keep on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import typer
from rich.table import Table
from rich.text import Text

from polar_gym.console import console
from polar_gym.errors import ConfigError
from polar_gym.registry import UnknownNameError
from polar_gym.runtimes import RUNTIMES, Runtime, SandboxError
from polar_gym.runtimes.audit import GUARANTEES, Finding, audit, make, worse_than_docker

STYLES = {"holds": "green", "lower": "yellow", "fails": "bold red"}

Findings = Mapping[str, Mapping[str, Finding]]
"""Runtime -> guarantee -> finding."""


def audit_sandboxes(names: Sequence[str]) -> None:
    """Probe real sandboxes of these runtimes, by default of all usable ones, and print what holds.

    Exits with 1 where a guarantee fails that Docker's default holds. Raises `ConfigError`; a runtime whose sandboxes
    cannot be probed does not keep the others from their table.
    """
    findings: dict[str, Mapping[str, Finding]] = {}
    broken = []
    for name, runtime in _runtimes(names).items():
        try:
            findings[name] = asyncio.run(_audit(runtime))
        except SandboxError as error:
            broken.append(f"runtime={name} cannot be probed: {error}")
    if findings:
        console.print(render(findings))
    if broken:
        raise ConfigError("; ".join(broken))
    if any(worse_than_docker(each) for each in findings.values()):
        raise typer.Exit(1)


def _runtimes(names: Sequence[str]) -> dict[str, Runtime]:
    """Return these runtimes; without names, all that can be used here. `auto` would only repeat one of the others."""
    try:
        made = {name: make(name) for name in names or RUNTIMES.names() if names or name != "auto"}
    except UnknownNameError as error:
        raise ConfigError(f"--runtime: {error}") from error
    lacking = {name: missing for name, runtime in made.items() if (missing := runtime.check())}
    if lacking and (names or lacking.keys() == made.keys()):
        raise ConfigError(
            "; ".join(f"runtime={name} cannot be used: {', '.join(each)}" for name, each in lacking.items())
        )
    return {name: runtime for name, runtime in made.items() if name not in lacking}


async def _audit(runtime: Runtime) -> dict[str, Finding]:
    try:
        return await audit(runtime)
    finally:
        await runtime.close()


def render(findings: Findings) -> Table:
    """Return a row for each guarantee, and a column for each runtime and for Docker's default."""
    worse = [f"{name}: {guarantee.name}" for name, each in findings.items() for guarantee in worse_than_docker(each)]
    verdict = (
        f"Worse than Docker's default: {', '.join(worse)}" if worse else "Nothing fails that Docker's default holds"
    )
    table = Table(title="polar-gym doctor --sandbox", title_justify="left", caption=verdict, caption_justify="left")
    for heading in ("guarantee", *findings, "Docker's default"):
        table.add_column(heading, overflow="fold")
    for guarantee in GUARANTEES:
        found = [each[guarantee.name] for each in findings.values()]
        name = Text(guarantee.name)
        if any(each.verdict == "fails" for each in found):
            name.append(f"\n{guarantee.why}", "dim")
        table.add_row(name, *(_cell(each) for each in (*found, guarantee.docker)))
    return table


def _cell(finding: Finding) -> Text:
    return Text.assemble((finding.verdict, STYLES[finding.verdict]), f"\n{finding.found}")
