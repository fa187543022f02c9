"""`polar-gym gateway`: one node of the rollout service."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.cli.settings_help import help_option, print_own_settings
from polar_gym.config.composition import why_idle
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RolloutConfig
from polar_gym.console import errors
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.process import serve
from polar_gym.gateway.node.settings import GatewaySettings, gateway_settings, split_own
from polar_gym.http.keys import NODE_KEY, hide_keys, take_key

app = typer.Typer()

_OF_REQUESTS = "the requests of a node bring their own; set it where they are submitted"
_OF_A_RUN = [f"rollout.{name}" for name in RolloutConfig.model_fields if name != "spans"]
_IDLE = {**dict.fromkeys([*_OF_A_RUN, "sampling", "budget"], _OF_REQUESTS), "rollout.state": "set state=DIR"}
"""Keys of settings without effect -> advice for the error."""


@app.command(add_help_option=False)  # its own says more
def gateway(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="The node's own settings, below, and the engine, proxy and pools of a rollout's config, "
            "e.g. engine=vllm engine.url=... pools.run=8",
        ),
    ] = None,
    _: Annotated[bool, help_option(print_own_settings, "gateway", GatewaySettings)] = False,
) -> None:
    """Run the sessions that a rollout server gives out: sandboxes, harnesses, capture, grading.

    Requests may name only the code and the files of this machine that `imports` and `directories` allow.

    The key between server and nodes is in POLAR_GYM_NODE_KEY, or in the file that POLAR_GYM_NODE_KEY_FILE names.
    """
    key = take_key(NODE_KEY)
    own, others = split_own(settings or [], GatewaySettings)
    for setting in others:
        if why := why_idle(setting, _IDLE, "on a node"):
            raise ConfigError(why)
    config = load_config(None, others)
    hide_keys(*config.engine_keys)
    asyncio.run(serve(config, gateway_settings(own), key, lambda line: errors.print(Text(line), soft_wrap=True)))
