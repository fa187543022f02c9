"""The judgement of what the probes found in a sandbox."""

from __future__ import annotations

import pytest

from polar_gym.runtimes.audit import GUARANTEES, Finding, Guarantee, worse_than_docker

ALL_HOLD = {each.name: Finding("holds") for each in GUARANTEES}


@pytest.mark.parametrize(
    ("found", "finding"),
    [
        ([], Finding("holds")),
        (["each file alone"], Finding("lower", "each file alone")),
        (["no limit", "each file alone"], Finding("fails", "no limit; each file alone")),
    ],
)
def test_only_what_is_named_as_weaker_does_not_break_a_guarantee(found: list[str], finding: Finding):
    assert Guarantee("disk", "harm", weaker=["each file alone"]).judge(found) == finding


@pytest.mark.parametrize("guarantee", GUARANTEES, ids=lambda each: each.name)
def test_a_failure_is_worse_than_docker_exactly_where_docker_holds(guarantee):
    assert worse_than_docker(ALL_HOLD) == []
    assert worse_than_docker(ALL_HOLD | {guarantee.name: Finding("lower", "")}) == []
    worse = worse_than_docker(ALL_HOLD | {guarantee.name: Finding("fails", "")})
    assert worse == ([guarantee] if guarantee.docker.verdict == "holds" else [])
