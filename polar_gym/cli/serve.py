"""`polar-gym serve`: the server of the rollout service."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.cli.settings_help import help_option, print_own_settings
from polar_gym.config.loading import load_config
from polar_gym.console import errors
from polar_gym.errors import ConfigError
from polar_gym.http.keys import hide_keys, load_keys
from polar_gym.service import process
from polar_gym.service.settings import ServeSettings, split_settings

app = typer.Typer()


SHIPPED = {"cluster": {"name": "local"}}
"""The choices of the server's own groups, where the user names none."""


@app.command(add_help_option=False)  # its own says more
def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="The server's own settings, below, and the engine, proxy and pools of a rollout's config for its "
            "nodes, e.g. engine=vllm engine.url=... pools.run=8",
        ),
    ] = None,
    _: Annotated[bool, help_option(print_own_settings, "serve", ServeSettings, SHIPPED)] = False,
) -> None:
    """Serve rollouts over HTTP: tasks in, episodes out, on many nodes; nothing is lost when a process dies.

    Requests may name only the code and the files of this machine that `imports` and `directories` allow.

    Keys: POLAR_GYM_SERVICE_KEY (trainers), POLAR_GYM_NODE_KEY (nodes), POLAR_GYM_CALLBACK_KEY (signs callbacks).

    Each may be in a file that <NAME>_FILE names. Without a callback key the service key signs.
    """
    own, others = split_settings(settings or [])
    if own.cluster.name == "none" and others:
        raise ConfigError(f"{others[0]}: unknown setting; with cluster=none the nodes have their own")
    config = load_config(None, others) if own.cluster.name != "none" else None
    keys = load_keys()
    hide_keys(*(config.engine_keys if config else []))
    asyncio.run(process.serve(own, config, keys, lambda line: errors.print(Text(line), soft_wrap=True)))
