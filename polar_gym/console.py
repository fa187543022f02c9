"""Where commands print: results to stdout, complaints to stderr."""

from __future__ import annotations

import os

from rich.console import Console

PIPED_WIDTH = 160
"""Columns of what is no terminal: a file has room, and a table cut to 80 columns loses what it says."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more (`| head`). Sessions that run go on: their episodes are in a file, not in the pipe."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, stderr: bool = False) -> Console:
    console = _Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


console = make_console()
errors = make_console(stderr=True)
