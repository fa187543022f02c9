"""The common form of the programs of this folder: options, results file, exit status, and where each is named."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from tests.show.result import NOT_CHECKED, Result, make_parser, parse

FOLDER = Path(__file__).parent
PROGRAMS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if path.stem not in ("__init__", "result") and not path.stem.startswith("test_")
)
LAWS = ("water is wet", "fire is hot")


def options(directory: Path, *arguments: str) -> argparse.Namespace:
    return parse(make_parser("x", "Show x.", quick="y"), ["--results", str(directory / "show" / "x.json"), *arguments])


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_has_the_common_options_and_states_its_laws(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"tests.show.{program}")
    monkeypatch.setattr("sys.argv", [program, "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "--quick" in said
    assert "leaves out:" in " ".join(said.split())
    assert "--results" in said
    assert module.LAWS


def test_every_program_is_in_the_table_and_has_a_target() -> None:
    names = [program.replace("_", "-") for program in PROGRAMS]
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE) == names
    makefile = (FOLDER.parents[1] / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^show-([a-z-]+): ##", makefile, re.MULTILINE) == names


def test_laws_that_hold_give_exit_status_0(tmp_path: Path) -> None:
    result = Result("x", LAWS, options(tmp_path))
    result.figures["drops"] = 3
    for law in LAWS:
        result.check(law, [])
    assert result.finish() == 0
    written = json.loads((tmp_path / "show" / "x.json").read_text(encoding="utf-8"))
    assert written["figures"] == {"drops": 3}
    assert written["laws"] == dict.fromkeys(LAWS, True)
    assert written["breaches"] == {}
    assert written["machine"].keys() == {"cores", "memory_gib", "kernel", "python"}
    assert written.keys() >= {"name", "quick", "options", "seconds", "polar_gym"}


def test_a_broken_law_gives_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("x", LAWS, options(tmp_path))
    result.check("water is wet", ["a [dry] drop"])
    result.check("fire is hot", [])
    result.check("water is wet", [])
    assert result.finish() == 1
    written = json.loads(result.path.read_text(encoding="utf-8"))
    assert written["laws"] == {"water is wet": False, "fire is hot": True}
    assert written["breaches"] == {"water is wet": ["a [dry] drop"]}
    assert "water is wet: a [dry] drop" in capsys.readouterr().out


def test_a_law_that_was_never_checked_does_not_hold(tmp_path: Path) -> None:
    result = Result("x", LAWS, options(tmp_path))
    result.check("water is wet", [])
    assert result.finish() == 1
    assert result.breaches["fire is hot"] == [NOT_CHECKED]


def test_a_law_that_was_never_stated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="law='ice is warm': x states no such law; add it to its LAWS"):
        Result("x", LAWS, options(tmp_path)).check("ice is warm", [])


def test_a_run_removes_the_results_of_an_earlier_one(tmp_path: Path) -> None:
    earlier = Result("x", (), options(tmp_path))
    earlier.finish()
    assert earlier.path.exists()
    Result("x", LAWS, options(tmp_path))
    assert not earlier.path.exists()


def test_quick_changes_defaults_and_not_what_is_given() -> None:
    parser = make_parser("x", "Show x.", quick="y")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kind", action="append")
    parser.add_argument("places", nargs="*", default=["here"])
    parser.set_defaults(kind=["a", "b"])

    def parsed(*arguments: str) -> tuple[int, list[str], list[str]]:
        found = parse(parser, arguments, {"count": 2, "kind": ["a"]})
        return found.count, found.kind, found.places

    assert parsed() == (200, ["a", "b"], ["here"])
    assert parsed("--quick") == (2, ["a"], ["here"])
    assert parsed("--quick", "--count=200", "--kind=c", "there") == (200, ["c"], ["there"])
    assert parsed("--kind=c", "--kind=d") == (200, ["c", "d"], ["here"])
