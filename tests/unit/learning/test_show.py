"""Which units `make show-learning` plays, and which it only reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.learning.units import HARNESSES, UNITS, Lines, Unit
from tests.show import learning

UNIT, CONTROL = Unit("codex", "trail", 0), Unit("codex", "trail", 0, "tool_output")


def _lines(reward: float) -> Lines:
    figures: dict[str, Any] = {"interval": [reward - 0.01, reward + 0.01], "sessions": 200, "masked": 0}
    start = [{"evaluated": 0, "greedy": greedy, **figures, "reward": 0.0} for greedy in (True, False)]
    return [*start, {"evaluated": 25, "greedy": False, **figures, "reward": reward}]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options for a cache and a folder docs/proofs that both have a finished unit."""
    monkeypatch.chdir(tmp_path)
    learning.write_proofs({UNIT.name: _lines(0.91)})
    kept = tmp_path / "cache" / UNIT.name
    (kept / "start").mkdir(parents=True)
    (kept / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _lines(0.91)))
    (kept / "curve.svg").touch()
    return argparse.Namespace(
        quick=False, anew=False, directory=tmp_path / "cache", minutes=1.0, results=tmp_path / "results.json"
    )


def _show(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """Return the names of the units that are played, each of which ends at 0.99 where nothing of it is in the cache."""
    played: list[str] = []

    def play(unit: Unit, directory: Path, say: object) -> Lines:
        played.append(unit.name)
        return _lines(0.91 if (directory / unit.name).exists() else 0.99)

    monkeypatch.setattr(learning, "play", play)  # a real unit takes 15 minutes
    learning.show(argparse.Namespace(**vars(options) | more), [UNIT, CONTROL])
    return played


def _end() -> float:
    return learning.end(learning.read_rows(learning.PROOFS / f"{UNIT.name}.jsonl"))["reward"]


def test_a_finished_unit_is_only_read(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _show(options, monkeypatch) == [CONTROL.name]
    assert _end() == 0.91


def test_a_transfer_stands_beside_the_unit_whose_start_model_it_has(options: argparse.Namespace) -> None:
    """Guards against a curve that begins at another start model, and a harness under the name of another one."""
    mixture, transfer = (unit for unit in UNITS if unit.name in ("mixture-trail-0", "pi-trail-0-transfer"))
    done = {}
    for unit, rewards in ((mixture, (0.1, 0.9)), (transfer, (0.2, 0.8))):
        first = "codex" if unit is mixture else "pi"
        more = [
            {
                "evaluated": step,
                "greedy": False,
                "harness": harness,
                "interval": [0.0, 1.0],
                "reward": reward + place / 100,
            }
            for step, reward in zip((0, 25), rewards, strict=True)
            for place, harness in enumerate(HARNESSES)
            if harness != first
        ]
        done[unit.name] = [*_lines(rewards[1]), *more]
    learning.write_proofs(done)
    page = (learning.PROOFS / "README.md").read_text()
    section = page.partition("## transfer")[2]
    assert "| mixture-trail-0 | 0.000 |" in section
    interval = "(0.000 to 1.000)"
    codex, claude_code, qwen_code = (
        f"{0.2 + place / 100:.3f} {interval}, {0.8 + place / 100:.3f} {interval}" for place in (0, 1, 3)
    )
    assert f"| pi | {codex} | {claude_code} | 0.000 (0.790 to 0.810), 0.800 (0.790 to 0.810) | {qwen_code} |" in section
    assert "| all four | 0.000 (" in section


def test_a_finished_unit_is_played_again_on_demand(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a proof that is said to be new and is the cache's old one, and against a control that is compared
    with the lines of before."""
    assert _show(options, monkeypatch, anew=True) == [UNIT.name, CONTROL.name]
    assert _end() == 0.99
    assert "codex-trail-0-tool_output: 0.990, without the control 0.990" in options.results.read_text()


def test_a_finished_unit_stays_where_no_time_is_left_to_play_it_again(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _show(options, monkeypatch, anew=True, minutes=0.0) == []
    assert (options.directory / UNIT.name / "start").exists()
    assert _end() == 0.91


def test_a_unit_that_was_stopped_goes_on(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    (options.directory / UNIT.name / "curve.svg").rename(options.directory / UNIT.name / "last.pt")
    _show(options, monkeypatch, anew=True)
    assert (options.directory / UNIT.name / "start").exists()


def test_a_start_model_without_a_step_is_made_again_on_demand(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a proof that is said to be new, and begins with a start model that an earlier program made for a
    control."""
    (options.directory / UNIT.name / "curve.svg").unlink()
    _show(options, monkeypatch, anew=True)
    assert not (options.directory / UNIT.name / "start").exists()
