"""Export SFT data from real episodes, and compare it with the captured calls: `make show-sft`.

The real pi works on the bundled tasks and on tasks that are made of package releases, with a scripted policy that
solves two of three. With `--histories`, it makes several attempts at each task out of these git histories instead (see
`make show-tasks`), and the graders say which are accepted. `polar-gym export sft` refuses these episodes without
`--allow-scripted`. With that option, the program loads the written data set with `datasets`, and compares every row's
ids and mask with the calls that the gateway journaled.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from polar_gym.cli import app
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import make_console
from polar_gym.curation.wrong import wrong_patches
from polar_gym.episodes.reading import read_episodes
from polar_gym.evaluators.patch import file_changes
from polar_gym.export.acceptance import Filters
from polar_gym.export.sft import export_sft
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.runs.run import roll_out
from polar_gym.schema import Episode, ModelCall
from polar_gym.tasks import Task
from polar_gym.tasks.request import reference_script
from tests.show.pypi_tasks import KEPT, make
from tests.show.result import Result, make_parser, parse
from tests.show.tasks import add_options, search_all

REFUSED, CAPTURED, NOTHING_ADDED = LAWS = (
    "episodes of a scripted policy are refused without --allow-scripted",
    "every row's ids and mask are those of the captured calls",
    "a second export adds nothing",
)


MUTANTS = 2
"""How many attempts at a task out of a history play a mutant of its solution, which the tests may not notice."""


def scripts(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return the reference solution of two tasks of three, and for each third task a script that gives up."""
    played = [reference_script(task) for task in tasks]
    return [giving_up(script) if place % 3 == 2 else script for place, script in enumerate(played)]


def attempts(task: Task, scratch: Path) -> list[dict[str, Any]]:
    """Return the scripts of some attempts: the reference solution, two mutants of it taken by chance, and giving up."""
    assert task.workspace is not None
    files = [change.path.decode() for change in file_changes(task.patch.encode())]
    before = {file: path.read_text() for file in files if (path := Path(task.workspace, file)).exists()}
    place = scratch / task.instance_id
    for file, text in before.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], input=task.patch.encode(), cwd=place, check=True)
    right = {file: path.read_text() for file in files if (path := place / file).exists()}
    wrong = [each for each in wrong_patches(task, before, right) if not each.name.startswith("cheat")]
    chosen = random.Random(task.instance_id).sample(wrong, min(MUTANTS, len(wrong)))
    played = [task, *(task.model_copy(update={"patch": each.diff.decode()}) for each in chosen)]
    return [*map(reference_script, played), giving_up(reference_script(task))]


def giving_up(script: Mapping[str, Any]) -> dict[str, Any]:
    commands = ["ls -a", f"echo {shlex.quote('No idea.')} > notes.txt"]
    return {**script, "commands": commands, "final_message": "I could not find the cause."}


def roll_out_histories(options: argparse.Namespace, scratch: Path, result: Result, console: Console) -> list[Path]:
    """Search the histories for tasks, make every attempt at them, and return the files of the episodes."""
    result.figures["histories"], paths = search_all(options, console)
    files = list[Path]()
    for path in paths:
        source = {"name": "jsonl", "path": str(path)}
        played = [attempts(task, scratch) for task in load_tasks(config(source, scratch / "none.jsonl", []))]
        for number, scripts in enumerate(zip_longest(*played)):
            files.append(scratch / f"{path.stem}-{number}.jsonl")
            own = [script for script in scripts if script is not None]
            asyncio.run(roll_out(config(source, files[-1], own, samples=1), console))
    return files


def run(source: dict[str, Any], output: Path, console: Console) -> list[Episode]:
    tasks = load_tasks(config(source, output, []))
    return asyncio.run(roll_out(config(source, output, scripts(tasks)), console))


def config(source: dict[str, Any], output: Path, played: list[dict[str, Any]], samples: int = 2) -> RunConfig:
    return load_config(
        settings={
            "harness": "pi",
            "runtime": "bubblewrap",
            "engine": {"name": "embedded", "scripts": played},
            "tasks": source,
            "rollout": {"num_samples": samples, "timeout_seconds": 600, "output": str(output)},
        }
    )


def check_rows(directory: Path, episodes: Sequence[Episode], cache: Path, result: Result) -> int:
    """Load the data set, compare every row with the journals, and return the number of compared token ids."""
    import datasets

    loaded = datasets.load_dataset(str(directory), cache_dir=str(cache))
    journals = {episode.session.session_id: episode.artifacts.journal for episode in episodes}
    traces = {trace.trace_id: trace for episode in episodes for trace in episode.trajectory.traces}
    compared = 0
    rows: list[dict[str, Any]] = [dict(row) for split in loaded.values() for row in split]
    result.check(CAPTURED, ["the data set has no rows"] * (not rows))
    for row in rows:
        journal = journals[row["session_id"]]
        assert journal is not None
        calls = {call.call_id: call for call in read_journal(Path(journal))}
        try:
            compared += check_row(row, [calls[call_id] for call_id in traces[row["trace_id"]].call_ids])
        except AssertionError as error:
            result.check(CAPTURED, [f"trace {row['trace_id']}: {error!r}"])
    return compared


def check_row(row: Mapping[str, Any], calls: Sequence[ModelCall]) -> int:
    """Compare a row with the calls of its trace, and return the number of its token ids."""
    ids, mask = np.asarray(row["input_ids"]), np.asarray(row["assistant_masks"])
    unexplained = mask.copy()
    for call in calls:
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
        np.testing.assert_array_equal(ids[:start], call.prompt_ids)
        np.testing.assert_array_equal(ids[start:end], call.response_ids)
        unexplained[start:end] = 0
    assert mask.any(), "nothing is trained"
    assert not unexplained.any(), "the mask holds tokens that were not sampled"
    assert len(ids) == len(mask)
    assert row["messages"][-1]["role"] == "assistant"
    return len(ids)


def roll_out_tasks(options: argparse.Namespace, files: Sequence[Path], console: Console) -> list[Episode]:
    """Roll out the bundled tasks, then (not with `--quick`) those of package releases, each into its own file."""
    sources = [{"name": "bundled"}, {"name": "jsonl", "path": str(options.tasks)}]
    return [episode for source, file in zip(sources, files, strict=False) for episode in run(source, file, console)]


def check_export(episodes: Sequence[Episode], files: Sequence[Path], out: Path, scratch: Path, result: Result) -> int:
    """Export the episodes, hold the data set against the laws, and return the number of compared token ids."""
    kinds = {str(entry.refused) for entry in export_sft(episodes, scratch / "refused", Filters())}
    result.check(REFUSED, [f"refused as {sorted(kinds)}"] * (kinds != {"scripted"}))
    app(["export", "sft", *map(str, files), "--out", str(out), "--allow-scripted"], standalone_mode=False)
    before = {path.name for path in out.rglob("*")}
    entries = export_sft(episodes, out, Filters(allow_scripted=True))
    result.figures["attempts"] = [entry.model_dump(exclude={"examples"}) for entry in entries]
    result.check(NOTHING_ADDED, sorted({path.name for path in out.rglob("*")} - before))
    return check_rows(out, episodes, scratch / "cache", result)


def main() -> int:
    parser = make_parser("sft", __doc__, quick="the tasks of package releases")
    parser.add_argument("--tasks", type=Path, default=KEPT, help="tasks of package releases; made where missing")
    parser.add_argument("--out", type=Path, help="keep the data set here")
    add_options(parser)
    options = parse(parser)
    result, console = Result("sft", LAWS, options), make_console()
    if not options.quick and not options.histories and not options.tasks.exists():
        asyncio.run(make(options.tasks, console))
    with tempfile.TemporaryDirectory(prefix="polar-gym-sft-") as name:
        scratch = Path(name)
        if options.histories:
            files = roll_out_histories(options, scratch, result, console)
            episodes = list(chain.from_iterable(map(read_episodes, files)))
        else:
            files = [scratch / "bundled.jsonl", scratch / "pypi.jsonl"][: 1 if options.quick else 2]
            episodes = roll_out_tasks(options, files, console)
        compared = check_export(episodes, files, options.out or scratch / "dataset", scratch, result)
    result.figures |= {"episodes": len(episodes), "compared_token_ids": compared}
    console.print(f"{compared} token ids and their masks were compared with the captured ones")
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
