"""The architecture page is drawn and listed from sources: a page that drifted from them would mislead."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]


def read(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def test_the_picture_is_what_its_source_draws() -> None:
    source = CHECKOUT / "docs" / "architecture.py"
    drawn = subprocess.run([sys.executable, source], capture_output=True, text=True, timeout=600, check=True).stdout
    assert drawn == read("docs/architecture.svg"), "python docs/architecture.py > docs/architecture.svg"


def test_the_rooms_of_the_page_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    floors = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]][1:]  # the first is `__main__`
    named: list[set[str]] = []
    for floor, rooms in re.findall(r"^\| (\d*) ?\| ((?:`\w+`(?:, )?)+) \|", read("ARCHITECTURE.md"), re.MULTILINE):
        named += [set()] if floor else []
        named[-1] |= set(re.findall(r"\w+", rooms))
    assert named == floors


def test_every_new_path_of_a_moved_module_exists() -> None:
    rows = re.findall(r"^\| ([\w/]+\.py) \| ([\w/]+(?:\.py|/)) \|$", read("docs/moved.md"), re.MULTILINE)
    assert len(rows) > 100
    assert [new for _, new in rows if not (CHECKOUT / "polar_gym" / new).exists()] == []
