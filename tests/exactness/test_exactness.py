"""The auditor's short form, with the stand-in for an engine: named cases, random sessions, and planted mistakes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.exactness.cases import CASES, run_case
from tests.exactness.fuzz import play_round
from tests.exactness.mutations import MUTATIONS, OF_CHOICES, clean_records, missed

SHORT = ("D3e", "D5", "D6", "D9", "D11")
"""The cases in which a gateway once lost tokens; `make show-exact` plays all."""

RECORDING_SEED = 5
"""Draws a round whose gateway records the sampler's choices."""


@pytest.mark.parametrize("name", SHORT)
async def test_a_named_case_leaves_nothing_out_of_the_books(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert await run_case(case, tmp_path) == []


async def test_the_books_of_random_sessions_are_those_of_the_recording(tmp_path: Path) -> None:
    played = await play_round(0, 40, tmp_path)
    assert {law: breaches for law, breaches in played.breaches.items() if breaches} == {}
    assert played.figures["tokens trained"] > 1000


async def test_records_of_the_samplers_choices_stay_aligned(tmp_path: Path) -> None:
    played = await play_round(RECORDING_SEED, 25, tmp_path)
    assert {law: breaches for law, breaches in played.breaches.items() if breaches} == {}
    assert played.figures["traces with experts"] > 10
    assert missed(played.records, OF_CHOICES) == []


async def test_every_planted_mistake_is_found(tmp_path: Path) -> None:
    records = await clean_records(tmp_path)
    assert {law: found for law, found in records.breaches().items() if found} == {}
    assert missed(records) == []
    assert len(MUTATIONS) > 20


def test_the_auditor_shares_no_code_with_the_package() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        if path.name == "gateway.py":  # the audited process
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert not {module for module in modules if module.split(".")[0] == "polar_gym"}, path.name
