"""Makes the start model of a run, out of sessions that a careless agent plays through the real harnesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_gym.config.run_config import RunConfig
from polar_gym.durable import remove_tree
from polar_gym.episodes.reading import read_episodes
from polar_gym.errors import ConfigError
from polar_gym.export.acceptance import Filters
from polar_gym.learning.cold_start import ColdStart
from polar_gym.learning.environments import Environments
from polar_gym.learning.families import Demonstration, Puzzle, demonstrate, make_puzzles, scripts, write_tasks
from polar_gym.learning.files import read_rows, write_episodes
from polar_gym.learning.meter import Meter
from polar_gym.learning.model import Size, save
from polar_gym.learning.report import failures

DEFAULT_SIZE = Size()
PLACES = 16
"""Demonstrations at once, where nothing else is said."""
BEGUN = "start.pt"
"""The file with the state of a training that has not ended."""
MOST_FAILED = 0.1
"""The largest share of demonstrations that may fail: a start model of much fewer rows is another one."""


def make_start_model(
    directory: Path,
    configs: Mapping[str, RunConfig],
    family: str,
    seed: int,
    count: int,
    meter: Meter,
    progress: Callable[[str], None],
    size: Size = DEFAULT_SIZE,
    places: int = PLACES,
) -> Path:
    """Make the start model in a run's directory where it is missing, and return its path. `configs`: harness -> its
    config; in each, a careless agent plays `count` tasks for training, `places` at once."""
    target = directory / "start"
    if target.exists():
        return target
    tasks = write_tasks(directory / "tasks", family, "train", seed, count)
    pairs = attempts(family, seed, count)
    progress(f"the start model: {count} demonstrations in {', '.join(configs)}, then some minutes of training on them")
    with meter.measured("demonstrations"):
        play_demonstrations(directory, configs, tasks, scripts(pairs), places)
    plan = planned(tasks, pairs)
    rows = [
        {**row, "lead": plan[row["task_id"]].lead} for row in demonstrated(directory, list(configs), plan, progress)
    ]
    with meter.measured("cold_start"):
        return train_start_model(directory, rows, seed, progress, size)


def attempts(family: str, seed: int, count: int) -> list[tuple[Puzzle, Demonstration]]:
    """Return the first tasks for training, each with the careless agent's attempt."""
    chance = random.Random(seed)
    return [(puzzle, demonstrate(puzzle, chance)) for puzzle in make_puzzles(family, "train", seed, count)]


def planned(tasks: Path, pairs: Sequence[tuple[Puzzle, Demonstration]]) -> dict[str, Demonstration]:
    """Return the attempt at each task of a file: task id -> attempt."""
    return {row["instance_id"]: attempt for row, (_, attempt) in zip(read_rows(tasks), pairs, strict=True)}


def play_demonstrations(
    directory: Path,
    configs: Mapping[str, RunConfig],
    tasks: Path,
    scripted: Sequence[Mapping[str, Any]],
    places: int = PLACES,
) -> None:
    """Have the scripted policy play all tasks of a file in each harness, once, and write `demonstrations.jsonl`. A
    training that began with earlier ones is given up: its tokenizer is another one."""
    played = directory / "demonstrations.jsonl"
    if played.exists():
        return
    (directory / BEGUN).unlink(missing_ok=True)
    ids = [row["instance_id"] for row in read_rows(tasks)]
    engine = {"policy": "scripted", "scripts": list(scripted)}
    source = {"name": "jsonl", "path": str(tasks)}
    with Environments(configs, places=places, seed=0, tasks=source, engine=engine) as environments:
        write_episodes(played, environments.play([(harness, task_id, 0) for harness in configs for task_id in ids], {}))


def demonstrated(
    directory: Path, harnesses: Sequence[str], plan: Mapping[str, Demonstration], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the rows that `polar-gym export sft` makes of a run's demonstrations, in the directory `sft`. Those that
    failed, or that did not get the reward of their plan, make none, which is told; raises `ConfigError` where they are
    too many, or are not those of the plan: task id -> attempt, played in each harness."""
    from polar_gym.export.sft import export_sft  # needs the extra `export`

    played = directory / "demonstrations.jsonl"
    episodes = list(read_episodes(played))
    wanted = sorted((harness, task_id) for harness in harnesses for task_id in plan)
    if wanted != sorted((episode.session.harness, episode.session.task_id) for episode in episodes):
        raise ConfigError(
            f"{played}: its {len(episodes)} demonstrations are not those of the {len(plan)} tasks from "
            f"{next(iter(plan))} on, in {', '.join(harnesses)}; remove the file, and run the same command again"
        )
    scored = [episode for episode in episodes if episode.reward is not None]
    good = [episode for episode in scored if episode.reward == plan[episode.session.task_id].solved]
    failed, otherwise = len(episodes) - len(good), len(scored) - len(good)
    reasons = [failures(episodes), f"{otherwise} x another reward than planned" if otherwise else ""]
    told = f"{played}: {failed} of {len(episodes)} demonstrations failed ({'; '.join(filter(None, reasons))})"
    if failed > MOST_FAILED * len(episodes):
        raise ConfigError(f"{told}; mend the cause, remove the file, and run the same command again")
    if failed:
        progress(f"{told}; the start model does without them")
    target = directory / "sft"
    remove_tree(target)
    filters = Filters(min_reward=0.0, allow_scripted=True)
    export_sft(good, target, filters)
    return [row for path in sorted((target / "jsonl").glob("*.jsonl")) for row in read_rows(path) if "messages" in row]


def train_start_model(
    directory: Path,
    rows: Sequence[dict[str, Any]],
    seed: int,
    progress: Callable[[str], None],
    size: Size = DEFAULT_SIZE,
) -> Path:
    """Train a start model on rows, each with its `lead`, and write it to the directory `start`. Return that.

    An interrupted training goes on from the file `BEGUN`, which is removed at the end."""
    kept = directory / BEGUN
    cold = ColdStart(rows, seed, size, kept, progress)
    cold.train()
    made, target = directory / "start.partial", directory / "start"
    save(cold.model, cold.tokenizer, made)
    made.rename(target)
    kept.unlink(missing_ok=True)
    return target
