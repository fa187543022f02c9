"""The command line: one module for each family of commands, registered here by name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer
from rich.logging import RichHandler
from rich.text import Text

from polar_gym.cli import episodes, evaluate, export, gateway, machine, nemo, service, tasks
from polar_gym.console import errors
from polar_gym.engines import EngineError
from polar_gym.errors import ConfigError

app = typer.Typer(
    help="Reinforcement learning over unmodified agent command-line harnesses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("rollout", add_help_option=False)(episodes.rollout)  # their own say more
app.command("eval")(evaluate.evaluate)
app.command("inspect")(episodes.inspect)
app.command("verify")(episodes.verify)
app.add_typer(export.app, name="export")
app.add_typer(tasks.app, name="tasks")
app.command("doctor")(machine.doctor)
app.command("serve", add_help_option=False)(service.serve)
app.command("gateway", add_help_option=False)(gateway.gateway)
app.command("submit")(service.submit)
app.command("status")(service.status)
app.command("cancel")(service.cancel)
app.command("watch")(service.watch)
app.command("nemo-root")(nemo.nemo_root)
app.command("nemo-recipes")(nemo.nemo_recipes)
app.command("nemo-link")(nemo.nemo_link)


def _say(what: str, message: str) -> None:
    """Plain text, not markup: what a user typed may hold brackets."""
    errors.print(Text.assemble((f"{what}: ", "bold red"), message), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 some sessions failed, 2 the request was wrong, 130 interrupted."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app(args=list(arguments) if arguments is not None else None)
    except ConfigError as error:
        _say("error", str(error))
        sys.exit(2)
    except EngineError as error:
        _say("engine", error.message)
        sys.exit(2)
