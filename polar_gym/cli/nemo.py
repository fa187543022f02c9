"""`polar-gym nemo-root | nemo-recipes | nemo-link`: the places where NeMo Gym and NeMo RL find polar-gym."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar_gym.errors import ConfigError
from polar_gym.nemo import component_root_for, installed_gym, link_agent
from polar_gym.paths import cache_dir, shipped_dir

app = typer.Typer()


@app.command()
def nemo_root(
    gym: Annotated[
        str | None, typer.Option(metavar="VERSION", help="NeMo Gym's version, where it is installed elsewhere.")
    ] = None,
) -> None:
    """Print NeMo Gym's component root: gym env start --search-dir "$(polar-gym nemo-root)" ..."""
    try:
        typer.echo(component_root_for(gym or installed_gym(), cache_dir()))
    except ValueError as error:
        raise ConfigError(f"--gym: {error}") from error
    except OSError as error:
        fix = "remove it, or set POLAR_GYM_CACHE to a directory of yours"
        raise ConfigError(f"{error.filename2 or error.filename}: {error.strerror}; {fix}") from error


@app.command()
def nemo_recipes() -> None:
    """Print the directory of the configs for NeMo RL: --config "$(polar-gym nemo-recipes)/grpo_codex.yaml"."""
    typer.echo(shipped_dir("recipes") / "nemo_rl")


@app.command()
def nemo_link(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where `gym` will be run.")] = Path(),
) -> None:
    """Link the NeMo Gym agent server into a directory: NeMo Gym 0.4 finds it nowhere else."""
    try:
        typer.echo(link_agent(directory))
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename}: exists already, and is not a link to the agent server"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename}: {error.strerror}; name a directory that can be written"
        ) from error
