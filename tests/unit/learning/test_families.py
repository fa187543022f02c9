"""Generated tasks: their splits share no name, their tests accept the solution and nothing less."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from polar_gym.learning.families import (
    FAMILIES,
    NAME,
    demonstrate,
    make_puzzle,
    make_puzzles,
    names,
    scripts,
    split_of,
    write_tasks,
)

FAMILY = pytest.mark.parametrize("family", FAMILIES)


def _found(*texts: str) -> set[str]:
    return {name for text in texts for name in re.findall(NAME, text)}


@FAMILY
def test_no_name_of_a_held_out_task_is_in_a_task_for_training(family: str) -> None:
    seen = {
        split: {
            name
            for number in range(200)
            for puzzle in [make_puzzle(family, split, 0, number)]
            for name in _found(puzzle.issue, puzzle.test, *puzzle.files, *puzzle.files.values())
        }
        for split in ("train", "held_out")
    }
    assert not seen["train"] & seen["held_out"]
    assert {split_of(name) for name in seen["held_out"]} == {"held_out"}
    assert len(seen["held_out"]) > 400


@FAMILY
def test_a_puzzle_follows_from_its_seed_and_number(family: str) -> None:
    assert make_puzzle(family, "train", 1, 2) == make_puzzle(family, "train", 1, 2)
    assert make_puzzle(family, "train", 1, 2) != make_puzzle(family, "train", 2, 2)
    assert make_puzzle(family, "train", 1, 2) != make_puzzle(family, "train", 1, 3)


@FAMILY
def test_the_test_accepts_an_attempt_that_is_right_at_every_decision_and_no_other(family: str, tmp_path: Path) -> None:
    told = []
    for number in range(40):
        puzzle = make_puzzle(family, "train", 0, number)
        demonstration = demonstrate(puzzle, random.Random(number))
        assert not _passes(puzzle.test, puzzle.files, [], tmp_path / f"{number}-nothing")
        passed = _passes(puzzle.test, puzzle.files, demonstration.commands, tmp_path / str(number))
        assert passed == demonstration.solved
        told.append(passed)
    assert 0.1 < sum(told) / len(told) < 0.7


def _passes(test: str, files: dict[str, str], commands: list[str], directory: Path) -> bool:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=directory, check=False, capture_output=True)
    return subprocess.run(["sh", "-c", test], cwd=directory, check=False).returncode == 0


@FAMILY
def test_a_careless_agent_without_a_lead_is_rarely_right(family: str) -> None:
    chance = random.Random(0)
    played = [demonstrate(make_puzzle(family, "train", 0, number), chance) for number in range(2000)]
    alone = [each.solved for each in played if not each.lead]
    assert 0.08 < sum(alone) / len(alone) < 0.25


@FAMILY
def test_each_script_matches_its_own_puzzle_only(family: str) -> None:
    puzzles = make_puzzles(family, "train", 0, 300)
    made = scripts([(puzzle, demonstrate(puzzle, random.Random(0))) for puzzle in puzzles])
    for puzzle in puzzles:
        assert sum(script["match"] in puzzle.issue for script in made) == 1


def test_names_share_no_unit() -> None:
    drawn = [name for _, name in zip(range(30), names("train", random.Random(3)), strict=False)]
    units = [unit for name in drawn for unit in (name[:2], name[2:])]
    assert len(set(units)) == len(units)


@FAMILY
def test_a_task_file_names_the_files_of_its_tasks(family: str, tmp_path: Path) -> None:
    path = write_tasks(tmp_path, family, "held_out", 5, 3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["instance_id"] for row in rows] == [f"{family}-held_out-5-{number}" for number in range(3)]
    for number, row in enumerate(rows):
        puzzle = make_puzzles(family, "held_out", 5, 3)[number]
        assert row["test_command"] == puzzle.test
        assert {file.name: file.read_text() for file in (tmp_path / row["workspace"]).iterdir()} == puzzle.files
