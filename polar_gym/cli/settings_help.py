"""`polar-gym rollout | serve | gateway --help`: every setting, as a user types it, with its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
import typer
from omegaconf import MISSING
from pydantic import BaseModel
from rich.padding import Padding
from rich.text import Text

from polar_gym.config.files import recipe_names
from polar_gym.config.help import Key, Section, section_of, sections
from polar_gym.config.run_config import RunConfig
from polar_gym.console import console

HOW = """\
recipe=NAME picks a ready-made run, group=CHOICE a part of it, key=value one
setting. As in Hydra: +key=value, ++key=value, ~key,
quotes ('harness.command=[sh, "-c", "a b"]'),
interpolation ('rollout.output=out/${harness.name}.jsonl').
With --multirun, a,b range(1,4) choice(a,b) glob(*) are runs one after another."""


def help_option(print_settings: Callable[..., None], *arguments: Any) -> Any:
    """Return a `--help` option that prints typer's own help and then every setting, by `print_settings(*arguments)`."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            typer.echo(context.get_help())
            print_settings(*arguments)
            raise typer.Exit

    return typer.Option("--help", "-h", is_eager=True, callback=show, help="Show this, with every setting.")


def print_run_settings() -> None:
    console.print(Text(HOW), "", Text.assemble(("recipe", "bold"), f"  {', '.join(recipe_names())}"), sep="\n")
    for section in sections():
        console.print()
        _print_section(section)


def print_own_settings(name: str, model: type[BaseModel], shipped: Mapping[str, Any] | None = None) -> None:
    _print_section(section_of(name, model, shipped or {}))
    console.print(Text(f"\n{', '.join(RunConfig.model_fields)}: as in `polar-gym rollout --help`"), soft_wrap=True)


def _print_section(section: Section) -> None:
    console.print(Text.assemble((section.name, "bold"), f"  {section.description}"))
    for choice, description in section.choices.items():
        _print_entry(Text.assemble((f"{section.name}={choice}", "cyan")), description)
    for key in section.keys:
        _print_entry(Text.assemble((f"{key.name}={_value(key.default)}", "cyan"), f"  ({_type(key)})"), key.description)


def _print_entry(head: Text, description: str) -> None:
    console.print(Padding(head, (0, 0, 0, 2), expand=False))
    if description:
        console.print(Padding(Text(description, "dim"), (0, 0, 0, 6), expand=False))


def _type(key: Key) -> str:
    return f"{key.type}, required" if key.default == MISSING else key.type


def _value(default: Any) -> str:
    """Return a default as a user would type it."""
    if default == MISSING:
        return "..."
    return orjson.dumps(default).decode() if isinstance(default, bool | list | dict | None) else str(default)
