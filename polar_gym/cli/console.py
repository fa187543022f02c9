"""Where commands print: results to stdout, complaints to stderr."""

import os

from rich.console import Console

PIPED_WIDTH = 160
"""Columns of what is no terminal: a file has room, and a table cut to 80 columns loses what it says."""


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


console = make_console()
errors = make_console(stderr=True)
