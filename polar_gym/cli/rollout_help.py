"""`polar-gym rollout --help`: every group and key of a config, as it is typed."""

from __future__ import annotations

from typing import Any

import orjson
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from polar_gym.composition import recipe_names
from polar_gym.config import MISSING
from polar_gym.config_help import Key, Section, sections

HOW = """\
recipe=NAME picks a ready-made run, group=CHOICE a part of it, key=value one setting. As in Hydra: +key=value,
++key=value, ~key, quotes ('harness.command=[sh, "-c", "a b"]'),
interpolation ('rollout.output=out/${harness.name}.jsonl').
With --multirun, a,b range(1,4) choice(a,b) glob(*) are as many runs, one after another."""


def print_settings(console: Console) -> None:
    console.print(Text(HOW), "", Text.assemble(("recipe", "bold"), f"  {', '.join(recipe_names())}"), sep="\n")
    for section in sections():
        console.print()
        _print_section(section, console)


def _print_section(section: Section, console: Console) -> None:
    console.print(Text.assemble((section.name, "bold"), f"  {section.description}"))
    for choice, description in section.choices.items():
        _print_entry(Text.assemble((f"{section.name}={choice}", "cyan")), description, console)
    for key in section.keys:
        _print_entry(
            Text.assemble((f"{key.name}={_value(key.default)}", "cyan"), f"  ({_type(key)})"), key.description, console
        )


def _print_entry(head: Text, description: str, console: Console) -> None:
    console.print(Padding(head, (0, 0, 0, 2)))
    if description:
        console.print(Padding(Text(description, "dim"), (0, 0, 0, 6)))


def _type(key: Key) -> str:
    return f"{key.type}, required" if key.default == MISSING else key.type


def _value(default: Any) -> str:
    """As it would be typed."""
    if default == MISSING:
        return "..."
    if isinstance(default, bool) or default is None:
        return {True: "true", False: "false", None: "null"}[default]
    if isinstance(default, list | dict):
        return orjson.dumps(default).decode()
    return str(default)
