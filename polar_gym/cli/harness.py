"""`polar-gym harness check`: whether a harness, at its pinned version or another one, works with the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import orjson
import typer
from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from polar_gym.config.checking import check_plugin
from polar_gym.conformance.checks import CHECKS, Report, report
from polar_gym.conformance.versions import newest
from polar_gym.console import console, errors, table
from polar_gym.errors import ConfigError
from polar_gym.harnesses import HARNESSES, Harness
from polar_gym.registry import UnknownNameError
from polar_gym.runtimes import RUNTIMES
from polar_gym.schema import HarnessSpec, PluginSpec

app = typer.Typer(no_args_is_help=True)

COLOURS = {"pass": "green", "fail": "bold red", "n/a": "dim"}


@app.callback()
def harness() -> None:
    """Check whether agent CLIs work with the gateway."""


@app.command("check")
def check_harnesses(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="NAME, NAME@VERSION, or an option of a NAME: harness.KEY=VALUE; default: all that are packages.",
            metavar="NAME...",
        ),
    ] = None,
    newest_versions: Annotated[
        bool, typer.Option("--newest", help="Check the newest published versions in place of the pinned ones.")
    ] = False,
    row: Annotated[list[str] | None, typer.Option(help="Make only this row; may be given several times.")] = None,
    runtime: Annotated[str, typer.Option(help="The kind of sandbox.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Run the conformance of harnesses against the gateway, with a scripted policy.

    Exit code 1 when a row fails.
    """
    if unknown := [name for name in row or [] if name not in CHECKS]:
        raise ConfigError(f"--row={unknown[0]!r}: unknown row; known: {', '.join(CHECKS)}")
    if runtime not in RUNTIMES.names():
        raise ConfigError(f"--runtime={runtime!r}: unknown runtime; known: {', '.join(RUNTIMES.names())}")
    check_plugin("runtime", RUNTIMES, PluginSpec(name=runtime))
    if lacking := RUNTIMES.make(PluginSpec(name=runtime)).check():
        raise ConfigError(f"--runtime={runtime}: this machine lacks {'; '.join(lacking)}")
    named = [word for word in names or [] if "=" not in word]
    options = _options([word for word in names or [] if "=" in word])
    packages = [name for name in HARNESSES.names() if HARNESSES.get(name).package]
    chosen = [_chosen(word, newest_versions) for word in named or packages]
    for name, _ in chosen:
        check_plugin("harness", HARNESSES, HarnessSpec(name=name, **options))
    reports = asyncio.run(_reports(chosen, runtime, row or list(CHECKS), options))
    if json:
        typer.echo(orjson.dumps(reports, option=orjson.OPT_INDENT_2))
    else:
        for report in reports:
            console.print(_table(report))
    if any(report.failed for report in reports):
        raise typer.Exit(1)


def _options(settings: list[str]) -> dict[str, Any]:
    """Return the options that `harness.KEY=VALUE` set. Raises `ConfigError`."""
    for setting in settings:
        if not setting.startswith("harness."):
            raise ConfigError(f"{setting}: expected harness.KEY=VALUE")
    found = cast("dict[str, Any]", OmegaConf.to_object(OmegaConf.from_dotlist(settings)))
    return found.get("harness", {})


def _chosen(word: str, newest_versions: bool) -> tuple[str, Harness]:
    """Return the name and the harness at the version to check. Raises `ConfigError`."""
    name, _, version = word.partition("@")
    try:
        harness = HARNESSES.get(name)
    except UnknownNameError as error:
        raise ConfigError(str(error)) from error
    if (version or newest_versions) and harness.package is None:
        raise ConfigError(f"{word}: {name} is no package, so it has no version")
    if version and newest_versions:
        raise ConfigError(f"{word}: name a version or --newest, not both")
    version = newest(harness) if newest_versions else version
    return name, replace(harness, version=version) if version else harness


async def _reports(
    chosen: Sequence[tuple[str, Harness]], runtime: str, rows: Sequence[str], options: Mapping[str, Any]
) -> list[Report]:
    with errors.status("") as status:

        def told(subject: str) -> Callable[[str], None]:
            return lambda check: status.update(Text(f"{subject}: {check}"))

        return [
            await report(name, each, runtime, rows, told(f"{name} {each.version}"), options) for name, each in chosen
        ]


def _table(report: Report) -> Table:
    behind = f", pinned: {report.pinned}" if report.pinned != report.version else ""
    shown = table(f"{report.harness} {report.version}{behind}", "", "check", "what was seen", justify="left")
    for row in report.rows:
        shown.add_row(Text(row.verdict, COLOURS[row.verdict]), row.check, Text.from_ansi(row.reason))
    return shown
