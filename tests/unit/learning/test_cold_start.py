"""The start model learns the agent's words alone, with other names in every batch and none that is held out."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polar_gym.errors import ConfigError
from polar_gym.learning import cold_start as cold_start_module
from polar_gym.learning.cold_start import CONFIRMING, LONG, ColdStart, Stage, noisy, usual_time
from polar_gym.learning.families import NAME, make_puzzles, split_of
from polar_gym.learning.model import Size

TOOL = {"type": "function", "function": {"name": "exec_command", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> ColdStart:
    return _make(tmp_path_factory.mktemp("cold_start"))


def _make(directory: Path) -> ColdStart:
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    rows = [_row(number) for number in range(20)]
    return ColdStart(rows, 0, Size(), directory / "start.pt", lambda line: None)


class StoppedError(Exception):
    """A training is interrupted."""


def _train(cold: ColdStart, stop_at: int | None = None) -> int:
    """Train until that step of the optimizer, and return the steps that were taken."""
    taken, take_step = 0, cold._take_step

    def counted(loss: Any, rate: float) -> None:
        nonlocal taken
        if taken == stop_at:
            raise StoppedError
        take_step(loss, rate)
        taken += 1

    with mock.patch.object(cold, "_take_step", counted), contextlib.suppress(StoppedError):
        cold.train()
    return taken


def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once began again, and minutes were lost."""
    stages = (Stage("one", 5, 1e-3), Stage("two", 6, 1e-3, choices_only=True))
    for name, value in {"STAGES": stages, "KEPT_STEPS": 2, "RECALLED": -1.0, "SHORT": LONG}.items():
        monkeypatch.setattr(cold_start_module, name, value)
    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
    whole = _make(tmp_path / "whole")
    assert _train(whole) == 1 + 5 + 6
    assert _train(_make(tmp_path / "interrupted"), 4) == 4  # the lists' one step, and three of which two were kept
    assert _train(_make(tmp_path / "interrupted"), 5) == 5  # three to the end of "one", and two of "two", all kept
    last = _make(tmp_path / "interrupted")
    assert _train(last) == 4
    for mine, theirs in zip(last.model.parameters(), whole.model.parameters(), strict=True):
        np.testing.assert_array_equal(mine.detach().numpy(), theirs.detach().numpy())


def test_a_model_that_does_not_learn_to_write_names_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a start model that fails at every task, whatever it decides: the stage ended without a word."""
    stages = (Stage("one", 2, 1e-3, until=2.0), Stage("two", 2, 1e-3))
    for name, value in {"STAGES": stages, "RECALLED": -1.0, "SHORT": LONG}.items():
        monkeypatch.setattr(cold_start_module, name, value)
    with pytest.raises(ConfigError, match="did not learn to write names in 2 steps"):
        _train(_make(tmp_path))


def test_a_name_that_few_rows_have_is_recalled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that ends after a batch with too few of the last commands: in `relay` with seed 1, their
    names were recalled with 0.45 at the end, and RL got to 0.385 instead of 0.9."""
    recalled = iter([0.96, 0.45, 0.96, 0.97])
    looked: list[int] = []

    def look(self: ColdStart, batches: Sequence[object]) -> float:
        looked.append(len(batches))
        return next(recalled)

    stages = (Stage("one", 1000, 1e-3, until=0.95),)
    for name, value in {"STAGES": stages, "RECALLED": -1.0, "SHORT": LONG, "BATCH": 2}.items():
        monkeypatch.setattr(cold_start_module, name, value)
    monkeypatch.setattr(ColdStart, "_recalled", look)
    assert _train(_make(tmp_path)) == 1 + 50
    assert looked == [1, CONFIRMING] * 2


def test_no_held_out_name_is_in_a_batch_and_names_change(cold_start: ColdStart) -> None:
    example = cold_start.examples[0][0]
    chance = random.Random(0)
    seen = {name for _ in range(50) for name in _names(cold_start, cold_start.labelled(example, False, chance)[0])}
    assert {split_of(name) for name in seen} == {"train"}
    assert len(seen) > 50


def test_one_name_stays_one_name(cold_start: ColdStart) -> None:
    """Guards against a renaming that breaks the copies which the model must learn."""
    ids, _ = cold_start.labelled(cold_start.examples[0][0], False, random.Random(0))
    text = cold_start.tokenizer.decode(ids)
    (asked,) = set(re.findall(rf"notes from ({NAME})", text))
    assert f'"cat {asked}"' in text
    (told,) = set(re.findall(rf"next ({NAME})", text))
    assert f'"cat {told}"' in text
    assert len(_names(cold_start, ids)) == 2


def test_the_agents_words_are_labels_and_nothing_else(cold_start: ColdStart) -> None:
    ids, labels = cold_start.labelled(cold_start.examples[3][0], False, random.Random(0))
    words = cold_start.tokenizer.decode(ids[labels])
    assert words.count("<|im_end|>") == 3
    assert words.endswith("done<|im_end|>")
    assert "Thanks" not in words, "an answer that the harness wrote"
    assert "Chunk ID" not in words
    assert "notes from" not in words


def test_a_lead_is_not_imitated(cold_start: ColdStart) -> None:
    """Guards against a lead that counts the harness's own answer: a start model for Qwen Code solved 0.995 greedily."""
    ids, labels = cold_start.labelled(cold_start.examples[3][0], True, random.Random(0))
    assert cold_start.tokenizer.decode(ids[labels]).count("<|im_end|>") == 2


def test_the_ids_that_a_harness_draws_differ_between_the_variants_of_a_row(cold_start: ColdStart) -> None:
    """Guards against a model that knows by an id how a row was decided: by claude_code's base commit, 23 % greedily."""
    texts = {cold_start.tokenizer.decode(example.ids) for example in cold_start.examples[0]}
    for id_of in (r"Chunk ID: (\w{6})", r"(\w{7}) Base commit"):
        assert len({re.findall(id_of, text)[0] for text in texts}) > 6


def test_the_date_differs_between_the_variants_of_a_row(cold_start: ColdStart) -> None:
    """Guards against a model that knows its rows by the date, and is lost after midnight."""
    texts = {cold_start.tokenizer.decode(example.ids) for example in cold_start.examples[0]}
    assert len({re.findall(r"Date: (20\d\d-\d\d-\d\d)", text)[0] for text in texts}) > 6


def test_every_second_variant_has_other_times(cold_start: ColdStart) -> None:
    """Guards against a model that is lost where commands take time: on a busy machine, codex tells of other times than
    0.0000 seconds, and a policy that solved 71 % of held-out tasks solved none."""
    times = [
        re.findall(r"Wall time: (\S+) seconds", cold_start.tokenizer.decode(example.ids))
        for example in cold_start.examples[0]
    ]
    assert {tuple(own) for own in times[::2]} == {("0.0000", "0.0000")}
    assert {tuple(own) for own in times[1::2]} != {("0.0000", "0.0000")}


def test_other_times_are_like_those_of_a_busy_machine() -> None:
    """Guards against times whose digits are all alike: real ones are short, and one command in many has one."""
    text = "Chunk ID: abcdef\nWall time: 0.0000 seconds\nChunk ID: 00ab12\nWall time: 0.0031 seconds"
    row = {"messages": [{"content": text}]}
    assert usual_time([row, {"messages": [{"content": "Wall time: 0.0000 seconds"}]}]) == "0.0000"
    drawn = [
        noisy(row, random.Random(seed), "0.0000", other_times=True)["messages"][0]["content"] for seed in range(99)
    ]
    times = [re.findall(r"Wall time: (\S+) seconds", each) for each in drawn]
    assert {own.count("0.0000") for own in times} == {0, 1, 2}
    short = [time for own in times for time in own if time.startswith("0.00") and time != "0.0000"]
    assert len(short) > 20
    same = noisy(row, random.Random(0), "0.0000", other_times=False)["messages"][0]["content"]
    assert re.findall(r"Wall time: (\S+) seconds", same) == ["0.0000", "0.0000"]
    assert "abcdef" not in same


def test_a_training_that_another_program_began_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a start model of two programs' stages."""
    stages = (Stage("one", 3, 1e-3),)
    for name, value in {"STAGES": stages, "KEPT_STEPS": 1, "RECALLED": -1.0, "SHORT": LONG}.items():
        monkeypatch.setattr(cold_start_module, name, value)
    assert _train(_make(tmp_path), 3) == 3
    monkeypatch.setattr(cold_start_module, "program", lambda: "another")
    assert _train(_make(tmp_path)) == 1 + 3


def test_every_unit_is_a_token(cold_start: ColdStart) -> None:
    text = make_puzzles("trail", "train", 0, 1)[0].issue
    pieces = [cold_start.tokenizer.decode([token]) for token in cold_start.tokenizer(text)["input_ids"]]
    (name,) = re.findall(NAME, text)
    assert name[:2] in pieces
    assert name[2:] in pieces
    assert "".join(pieces) == text


def _names(cold_start: ColdStart, ids: np.ndarray) -> set[str]:
    return set(re.findall(NAME, cold_start.tokenizer.decode(ids)))


def _row(number: int) -> dict[str, Any]:
    puzzle = make_puzzles("trail", "train", 0, number + 1)[number]
    first, second, *_ = puzzle.files
    result = f"Chunk ID: {number:06x}\nWall time: 0.0000 seconds\nOutput:\n{puzzle.files[first]}"
    return {
        "task_id": str(number),
        "harness": "codex",
        "lead": 1,
        "tools": [TOOL],
        "trained": [False, False, False, True, False, True, False, True],
        "messages": [
            {"role": "user", "content": "Here is some context."},
            {"role": "assistant", "content": "Thanks for the context."},  # as Qwen Code writes for the model
            {"role": "user", "content": f"Date: 2026-11-23\n49d59d6 Base commit\n{puzzle.issue}"},
            _call(f"cat {first}"),
            {"role": "tool", "content": result},
            _call(f"cat {second}"),
            {"role": "tool", "content": "Chunk ID: 00ab12\nWall time: 0.0000 seconds\nOutput:\n"},
            {"role": "assistant", "content": "done"},
        ],
    }


def _call(command: str) -> dict[str, Any]:
    function = {"name": "exec_command", "arguments": {"cmd": command}}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
