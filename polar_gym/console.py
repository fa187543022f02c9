"""The consoles of the commands: results go to stdout, complaints to stderr."""

from __future__ import annotations

import os

from rich.console import Console, JustifyMethod
from rich.table import Table

PIPED_WIDTH = 160
"""Columns of output to a file or a pipe. A table that is cut to 80 columns, rich's default, loses content."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Print no more, because the reader has closed the pipe (`| head`).

        Running sessions go on: their episodes go to a file, not into the pipe.
        """
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, stderr: bool = False) -> Console:
    console = _Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def table(title: str, first: str, *headings: str, justify: JustifyMethod = "right") -> Table:
    """Return a table of figures: a first column of names, and right-aligned columns. `justify`: "left" for words."""
    made = Table(title=title, title_justify="left", header_style="bold")
    made.add_column(first, overflow="fold")
    for heading in headings:
        made.add_column(heading, justify=justify, overflow="fold")
    return made


console = make_console()
errors = make_console(stderr=True)
