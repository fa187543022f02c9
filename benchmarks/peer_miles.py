"""Runs miles' session server for a benchmark. `benchmarks.peers` starts this with a Python that has miles and SGLang.

The server renders with the tokenizer and sends all ids of a conversation to the engine, as SGLang takes them. A session
is opened by its first request here: the server would name sessions itself.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace

from miles.rollout.session import sessions  # pyright: ignore[reportMissingImports]
from miles.rollout.session.linear_trajectory import (  # pyright: ignore[reportMissingImports]
    LinearTrajectory,
    SessionRegistry,
)
from miles.rollout.session.server import run_session_server  # pyright: ignore[reportMissingImports]
from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]


class NamedSessions(SessionRegistry):
    """Sessions with the names that clients give them."""

    def get_session(self, session_id: str) -> LinearTrajectory:
        return self.sessions.setdefault(session_id, LinearTrajectory())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--template", type=Path, required=True)
    arguments = parser.parse_args()
    sessions.SessionRegistry = NamedSessions
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(arguments.tokenizer))
    tokenizer.chat_template = arguments.template.read_text()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        own = {"session_server_ip": "127.0.0.1", "session_server_port": arguments.port}
        run_session_server(SimpleNamespace(hf_checkpoint=directory, **own), arguments.engine)


if __name__ == "__main__":
    main()
