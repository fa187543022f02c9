"""`polar-gym harness check`: whether a harness, at its pinned version or another one, works with the gateway."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from polar_gym.conformance.checks import CHECKS, Row, Subject, check
from polar_gym.conformance.versions import newest
from polar_gym.console import console, errors
from polar_gym.errors import ConfigError
from polar_gym.harnesses import HARNESSES, Harness
from polar_gym.harnesses.install import InstallError, install
from polar_gym.paths import cache_dir
from polar_gym.runtimes import RUNTIMES

app = typer.Typer(no_args_is_help=True)

COLOURS = {"pass": "green", "fail": "bold red", "n/a": "dim"}


@app.callback()
def harness() -> None:
    """Check whether agent CLIs work with the gateway."""


@app.command("check")
def check_harnesses(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="NAME or NAME@VERSION; default: all that are packages.", metavar="NAME..."),
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
    chosen = [_chosen(name, newest_versions) for name in names or _packages()]
    reports = [_report(name, harness, runtime, row or list(CHECKS)) for name, harness in chosen]
    if json:
        console.print(orjson.dumps(reports, option=orjson.OPT_INDENT_2).decode(), markup=False, soft_wrap=True)
    else:
        for report in reports:
            console.print(_table(report))
    if any(row["verdict"] == "fail" for report in reports for row in report["rows"]):
        raise typer.Exit(1)


def _packages() -> list[str]:
    return [name for name in HARNESSES.names() if HARNESSES.get(name).package]


def _chosen(word: str, newest_versions: bool) -> tuple[str, Harness]:
    """Return the name and the harness at the version to check. Raises `ConfigError`."""
    name, _, version = word.partition("@")
    harness = HARNESSES.get(name)
    if (version or newest_versions) and harness.package is None:
        raise ConfigError(f"{word}: {name} is no package, so it has no version")
    if version and newest_versions:
        raise ConfigError(f"{word}: name a version or --newest, not both")
    version = newest(harness) if newest_versions else version
    return name, replace(harness, version=version) if version else harness


def _report(name: str, harness: Harness, runtime: str, rows: list[str]) -> dict[str, Any]:
    """Return the report of a harness; a harness that cannot be installed has one row."""
    pinned = HARNESSES.get(name).version
    head = {"harness": name, "package": harness.package, "version": harness.version, "pinned": pinned}
    subject = f"{name} {harness.version}".strip()
    with errors.status("") as status:
        status.update(Text(f"{subject}: installing"))
        try:
            if harness.package:
                install(harness, cache_dir())
        except InstallError as error:
            found = [Row(check="installation", verdict="fail", reason=_brief(str(error)))]
        else:
            said = lambda check: status.update(Text(f"{subject}: {check}"))  # noqa: E731
            found = asyncio.run(_checked(name, harness, runtime, rows, said))
    return {**head, "rows": [asdict(row) for row in found]}


async def _checked(name: str, harness: Harness, runtime: str, rows: list[str], said: Any) -> list[Row]:
    return await check(Subject(name, harness, runtime), rows, said)


def _brief(message: str) -> str:
    """Return the first line of an installer's error and its most telling one."""
    head, *rest = message.splitlines()
    telling = [line for line in rest if "No match" in line or "notarget" in line or "ERROR" in line] or rest
    return " ".join([head, *telling[-1:]])


def _table(report: dict[str, Any]) -> Table:
    behind = f", pinned: {report['pinned']}" if report["pinned"] != report["version"] else ""
    table = Table(title=f"{report['harness']} {report['version']}{behind}", title_justify="left")
    for heading in ("", "check", "what was seen"):
        table.add_column(heading, overflow="fold")
    for row in report["rows"]:
        table.add_row(Text(row["verdict"], COLOURS[row["verdict"]]), row["check"], Text(row["reason"]))
    return table
