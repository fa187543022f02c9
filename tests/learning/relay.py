"""A family of tasks in which codex compacts its context, for the control that trains the main trace alone.

The agent reads a long note. Codex then asks for a summary, and goes on in a context that holds nothing but the task and
this summary. The careless agent often leaves the word out of the summary; the word is in no later context then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polar_gym.config.loading import load_config
from polar_gym.learning import families
from polar_gym.learning.families import Decision, Puzzle, write_tasks
from polar_gym.learning.start import attempts, demonstrated, planned, play_demonstrations, train_start_model
from polar_gym.schema import Episode

FAMILY = "relay"
LINES = 100
"""Lines of a note. Codex counts a token for four bytes of them."""
TINY_CONTEXT, SCRIPTED_CONTEXT = 1000, 3200
"""Codex compacts at three quarters of these: after it has read a note, and not again. The scripted policy's tokenizer
makes more tokens of a prompt than the start model's."""
EMPTY = "nothing"
"""The careless agent's summary."""
SUMMARISED = "Here is the summary produced by the other language model"


def relay(names: Iterator[str], chance: random.Random) -> Puzzle:
    note, word = next(names), next(names)
    lines = "".join(f"line {number} of the note says nothing at all\n" for number in range(LINES))
    return Puzzle(
        f"Read {note} and make an empty file with its word.",
        {note: f"{lines}word {word}\n"},
        f"test -f {word} && test $(ls | wc -l) = 2",
        [
            Decision(f"cat {note}"),
            Decision(f"word {word}", EMPTY, 0.2),  # the summary
            Decision(f"touch {word}", f"cat {word}", 0.7),
        ],
    )


def make_start(directory: Path, seed: int, count: int, say: Callable[[str], None]) -> Path:
    """Make the start model in a directory where it is missing, and return its path. Makes the family known."""
    families.FAMILIES[FAMILY] = relay
    if (directory / "start").exists():
        return directory / "start"
    tasks = write_tasks(directory / "tasks", FAMILY, "train", seed, count)
    pairs = attempts(FAMILY, seed, count)
    scripts = [script for pair in pairs for script in _scripts(*pair)]
    config = load_config("learn", ["harness=codex", f"engine.max_model_len={SCRIPTED_CONTEXT}"])
    play_demonstrations(directory, {"codex": config}, tasks, scripts)
    plan = planned(tasks, pairs)
    rows = [
        {**row, "lead": _lead(row, plan[row["task_id"]].lead)} for row in demonstrated(directory, ["codex"], plan, say)
    ]
    return train_start_model(directory, rows, seed, say)


def _scripts(puzzle: Puzzle, attempt: families.Demonstration) -> list[dict[str, Any]]:
    """Return the script before the compaction, whose last words are the summary, and the script after it."""
    read, summary, *after = attempt.commands
    return [
        {"match": puzzle.issue, "commands": [read], "final_message": summary},
        {"match": f"{SUMMARISED}, use the information in this summary to assist with your own analysis:\n{summary}",
         "commands": after, "final_message": "done"},
    ]  # fmt: skip


def _lead(row: dict[str, Any], lead: int) -> int:
    """Return the lead of a trace: the trace after a compaction begins at the third decision."""
    return max(0, lead - 2) if any(SUMMARISED in str(message["content"]) for message in row["messages"]) else lead


def main_trace(episode: Episode) -> Episode:
    """Return the episode with its last trace alone."""
    last = episode.trajectory.model_copy(update={"traces": episode.trajectory.traces[-1:]})
    return episode.model_copy(update={"trajectory": last})
