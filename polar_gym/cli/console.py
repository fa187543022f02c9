"""Where commands print: results to stdout, complaints to stderr."""

from rich.console import Console

console = Console()
errors = Console(stderr=True)
