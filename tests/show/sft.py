"""SFT data from real episodes: `make show-sft`.

    python -m tests.show.sft [--tasks FILE] [--out DIR]

The real pi works on the bundled tasks and on tasks that are made of package releases, with a scripted policy that
solves two of three. `polar-gym export sft` refuses its episodes unless asked for; then what it writes is loaded with
`datasets`, and every row's ids and mask are compared with the calls that the gateway journaled. A second export adds
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from polar_gym.cli import app
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import make_console
from polar_gym.export.acceptance import Filters
from polar_gym.export.sft import export_sft
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.runs.run import roll_out
from polar_gym.schema import Episode
from polar_gym.tasks import Task
from polar_gym.tasks.request import reference_script
from tests.show.pypi_tasks import KEPT, make


def scripts(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The reference solution for two tasks of three, and for every third one that looks around and gives up."""
    played = [reference_script(task) for task in tasks]
    for script in played[2::3]:
        script["commands"] = ["ls -a", f"echo {shlex.quote('No idea.')} > notes.txt"]
        script["final_message"] = "I could not find the cause."
    return played


def run(source: dict[str, Any], output: Path, console: Console) -> list[Episode]:
    tasks = load_tasks(config(source, output, []))
    return asyncio.run(roll_out(config(source, output, scripts(tasks)), console))


def config(source: dict[str, Any], output: Path, played: list[dict[str, Any]]) -> RunConfig:
    return load_config(
        settings={
            "harness": "pi",
            "runtime": "bubblewrap",
            "engine": {"name": "embedded", "scripts": played},
            "tasks": source,
            "rollout": {"num_samples": 2, "timeout_seconds": 300, "output": str(output)},
        }
    )


def check_rows(directory: Path, episodes: Sequence[Episode], cache: Path) -> int:
    """Load the dataset and hold every row against the journals; how many token ids were compared."""
    import datasets

    loaded = datasets.load_dataset(str(directory), cache_dir=str(cache))
    journals = {episode.session.session_id: episode.artifacts.journal for episode in episodes}
    traces = {trace.trace_id: trace for episode in episodes for trace in episode.trajectory.traces}
    compared = 0
    rows: list[dict[str, Any]] = [dict(row) for split in loaded.values() for row in split]
    for row in rows:
        ids, mask = np.asarray(row["input_ids"]), np.asarray(row["assistant_masks"])
        journal = journals[row["session_id"]]
        assert journal is not None
        calls = {call.call_id: call for call in read_journal(Path(journal))}
        unexplained = mask.copy()
        for call in (calls[call_id] for call_id in traces[row["trace_id"]].call_ids):
            start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
            np.testing.assert_array_equal(ids[:start], call.prompt_ids)
            np.testing.assert_array_equal(ids[start:end], call.response_ids)
            unexplained[start:end] = 0
        assert mask.any(), row["trace_id"]
        assert not unexplained.any(), row["trace_id"]
        assert len(ids) == len(mask)
        assert row["messages"][-1]["role"] == "assistant"
        compared += len(ids)
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description="Make SFT data and check it.")
    parser.add_argument("--tasks", type=Path, default=KEPT, help="tasks of package releases; made where missing")
    parser.add_argument("--out", type=Path, help="keep the dataset here")
    arguments = parser.parse_args()
    console = make_console()
    if not arguments.tasks.exists():
        asyncio.run(make(arguments.tasks, console))
    with tempfile.TemporaryDirectory(prefix="polar-gym-sft-") as scratch:
        files = [Path(scratch, "bundled.jsonl"), Path(scratch, "pypi.jsonl")]
        sources = [{"name": "bundled"}, {"name": "jsonl", "path": str(arguments.tasks)}]
        episodes = [episode for pair in zip(sources, files, strict=True) for episode in run(*pair, console)]

        refused = export_sft(episodes, Path(scratch, "refused"), Filters())
        assert {entry.refused for entry in refused} == {"scripted"}
        out: Path = arguments.out or Path(scratch, "dataset")
        command = ["export", "sft", *map(str, files), "--out", str(out), "--allow-scripted"]
        app(command, standalone_mode=False)
        before = sorted(path.name for path in out.rglob("*"))
        export_sft(episodes, out, Filters(allow_scripted=True))
        assert sorted(path.name for path in out.rglob("*")) == before, "a second export added something"
        compared = check_rows(out, episodes, Path(scratch, "cache"))
    console.print(f"{compared} token ids and their masks, loaded with datasets, are those that were captured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
