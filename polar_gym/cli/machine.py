"""`polar-gym doctor`: what this machine can run."""

from __future__ import annotations

from typing import Annotated

import typer

from polar_gym.console import console
from polar_gym.errors import ConfigError


def doctor(
    engine_url: Annotated[str | None, typer.Option(help="Also ask the vLLM at this URL.")] = None,
) -> None:
    """Say what this machine can run, and what to install for the rest."""
    from polar_gym.cli.doctor import can_run, diagnose, render
    from polar_gym.http.urls import is_http_url

    if engine_url is not None and not is_http_url(engine_url):
        raise ConfigError(f"--engine-url={engine_url!r}: expected a URL, e.g. http://127.0.0.1:8000")
    checks = diagnose(engine_url=engine_url)
    console.print(render(checks))
    if not can_run(checks):
        raise typer.Exit(1)
