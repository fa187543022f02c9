"""The command line: one module for each family of commands, loaded when one of them is called.

`polar-gym --help` loads none: it reads the summary of each command from the docstring in the module's source.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from polar_gym.console import errors

COMMANDS = {
    "rollout": "rollout.rollout",
    "branch": "branch.branch",
    "learn": "learn.learn",
    "eval": "evaluate.evaluate",
    "view": "view.view",
    "inspect": "episodes.inspect",
    "verify": "episodes.verify",
    "reuse": "episodes.reuse",
    "doctor": "doctor.doctor",
    "serve": "serve.serve",
    "gateway": "gateway.gateway",
    "submit": "service.submit",
    "status": "service.status",
    "cancel": "service.cancel",
    "watch": "service.watch",
    "nemo-root": "nemo.nemo_root",
    "nemo-recipes": "nemo.nemo_recipes",
    "nemo-link": "nemo.nemo_link",
    "export": "export.export",
    "tasks": "tasks.tasks",
    "harness": "harness.harness",
}
"""Command -> its module in this room and its function, in the order of `--help`. Each module holds a `typer.Typer`
called `app`. The function of `export`, `tasks` and `harness` is the callback of such an app, whose commands are
sub-commands."""


class _Commands(TyperGroup):
    """Lists the commands by name and summary, and loads the module of the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=_summary(place)) for name, place in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _load(str(name)), rest

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        with _interruptible():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        with _interruptible():
            return super().invoke(ctx)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Print one line where the user interrupts; typer itself would say nothing."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


def _summary(place: str) -> str:
    """Return the first paragraph of the docstring of a function of this room, without importing its module."""
    module, _, function = place.partition(".")
    (found,) = (node for node in _source(module).body if isinstance(node, ast.FunctionDef) and node.name == function)
    return (ast.get_docstring(found) or "").partition("\n\n")[0]


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))


def _load(name: str) -> Any:
    module = import_module(f"{__name__}.{COMMANDS[name].partition('.')[0]}")
    family = typer.main.get_group(module.app)
    return family.commands.get(name, family)


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polar-gym {metadata.version('polar-gym')}")
        raise typer.Exit


@app.callback()
def polar_gym(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning over unmodified agent command-line harnesses."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script. Exit codes: 0 done, 1 some sessions failed, 2 a wrong request, 75 the same command may
    succeed later (`os.EX_TEMPFAIL`), 130 interrupted."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app(args=list(arguments) if arguments is not None else None)
    except Exception as error:
        from polar_gym.engines import UNREACHABLE, EngineError  # these load much that `--help` does not need
        from polar_gym.errors import ConfigError, UnavailableError

        if not isinstance(error, ConfigError | EngineError):
            raise
        head, said = ("error: ", str(error)) if isinstance(error, ConfigError) else ("engine: ", error.message)
        # Plain text, not markup: the user's own words may hold brackets.
        errors.print(Text.assemble((head, "bold red"), said), soft_wrap=True)
        away = isinstance(error, EngineError) and error.kind in (UNREACHABLE, "overloaded")
        later = away or isinstance(error, UnavailableError)
        sys.exit(os.EX_TEMPFAIL if later else 2)
