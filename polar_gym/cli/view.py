"""`polar-gym view`: look at episodes in a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.builders import BUILDERS
from polar_gym.console import console, errors
from polar_gym.durable import replacing
from polar_gym.episodes.reading import read_calls, read_with_files
from polar_gym.errors import ConfigError
from polar_gym.paths import check_writable
from polar_gym.schema import Episode, ModelCall
from polar_gym.view.annotations import Annotations
from polar_gym.view.blocks import Block, Encoder, names_of
from polar_gym.view.follow import follow
from polar_gym.view.page import write_page

app = typer.Typer()


@app.command()
def view(
    files: Annotated[list[Path], typer.Argument(help="Files of episodes, as `polar-gym rollout` writes them.")],
    out: Annotated[Path | None, typer.Option(help="Write one HTML file with everything in it; else serve it.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model directory or tokenizer.json, where the files name none.")
    ] = None,
    annotations: Annotated[
        list[Path] | None, typer.Option(help="Per-token values of a trainer, JSON lines or Parquet.")
    ] = None,
    builder: Annotated[
        list[str] | None, typer.Option(help="Show also the traces that this builder makes of the recorded calls.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port on the loopback interface; default: any.")
    ] = None,
) -> None:
    """Show episodes in a browser: the run, and each conversation with its tokens, forks and grading.

    Without --out the page is served on this machine until Ctrl-C, and gets episodes as they are written.
    """
    if wrong := [name for name in builder or [] if name not in BUILDERS.names()]:
        raise ConfigError(f"--builder={wrong[0]}: unknown; known here: {', '.join(BUILDERS.names())}")
    if out is not None and port is not None:
        raise ConfigError(f"--port={port}: has no effect with --out, which serves no page; leave it out")
    make_encoder = partial(Encoder, tokenizer, Annotations(annotations or []), builder or [])
    if out is None:
        asyncio.run(
            follow(files, make_encoder, _calls, port or 0, lambda line: errors.print(Text(line), soft_wrap=True))
        )
        return
    check_writable("--out", out)
    encoder = make_encoder()
    try:
        with replacing(out) as file:
            count = write_page(_blocks(files, encoder), file)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: {error.strerror}; name a file that can be written") from error
    if encoder.annotations.unused:
        missing = ", ".join(trace_id for _, trace_id in sorted(encoder.annotations.unused)[:3])
        errors.print(Text(f"{len(encoder.annotations.unused)} annotated traces are in no episode: {missing}", "yellow"))
    console.print(Text(f"{count} episodes, {out.stat().st_size / 1e6:.1f} MB: {out}"), soft_wrap=True)


def _blocks(files: list[Path], encoder: Encoder) -> Iterator[Block]:
    """Yield the blocks of all files; say for how many episodes the captured calls are not known."""
    without, names = 0, dict(zip(files, names_of(files), strict=True))
    for file, episode in read_with_files(files):
        calls = _calls(episode)
        without += not calls
        yield from encoder.blocks(names[file], episode, calls)
    if without:
        errors.print(Text(f"{without} episodes without their journal: calls that are in no trace are counted only"))


def _calls(episode: Episode) -> list[ModelCall]:
    """Return the captured calls of an episode; none where the journal is not on this machine."""
    journal = episode.artifacts.journal
    return read_calls(episode) if journal is not None and Path(journal).is_file() else []
