"""The judgement of what the probes found in a sandbox."""

from __future__ import annotations

import pytest

from polar_gym.runtimes.audit import GUARANTEES, Answer, Finding, judge, worse_than_docker

ALL_HOLD = {each.name: Finding("holds", "") for each in GUARANTEES}


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (([], [], "all are refused"), Finding("holds", "all are refused")),
        (([], ["each file alone"], ""), Finding("lower", "each file alone")),
        ((["keyctl", "bpf"], ["weak"], "words"), Finding("fails", "keyctl; bpf")),
    ],
)
def test_what_breaks_a_guarantee_counts_more_than_what_weakens_it(answer: Answer, finding: Finding):
    assert judge(answer) == finding


@pytest.mark.parametrize("guarantee", GUARANTEES, ids=lambda each: each.name)
def test_a_failure_is_worse_than_docker_exactly_where_docker_holds(guarantee):
    assert worse_than_docker(ALL_HOLD) == []
    assert worse_than_docker(ALL_HOLD | {guarantee.name: Finding("lower", "")}) == []
    worse = worse_than_docker(ALL_HOLD | {guarantee.name: Finding("fails", "")})
    assert worse == ([guarantee] if guarantee.docker.verdict == "holds" else [])
