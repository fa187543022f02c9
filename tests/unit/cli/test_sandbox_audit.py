"""The table of `polar-gym doctor --sandbox`, and its refusals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from polar_gym.cli.doctor import doctor
from polar_gym.cli.sandbox_audit import audit_sandboxes, render
from polar_gym.errors import ConfigError
from polar_gym.runtimes.audit import GUARANTEES, Finding

HOLDS = {each.name: Finding("holds", "as it should") for each in GUARANTEES}


def printed(findings: dict[str, dict[str, Finding]]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(findings))
    return console.export_text()


def test_a_failure_is_shown_with_its_damage_and_compared_with_docker():
    text = printed({"good": HOLDS, "bad": HOLDS | {"leftovers": Finding("fails", "in the session keyring")}})
    assert "in the session keyring" in text
    assert "a session gives hidden tests to a later one" in text
    assert "Worse than Docker's default: bad: leftovers" in text


def test_a_failure_that_docker_shares_is_not_worse():
    text = printed({"bad": HOLDS | {"disk": Finding("fails", "no limit")}})
    assert "Worse than Docker's default: nothing" in text


def test_a_runtime_that_isolates_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"runtime\.accept_no_isolation=False: .*isolates nothing"):
        audit_sandboxes(["unconfined"])


def test_an_unknown_runtime_is_refused():
    with pytest.raises(ConfigError, match="--runtime: unknown runtime 'bubblewarp'; known: apptainer"):
        audit_sandboxes(["bubblewarp"])


def test_a_runtime_that_lacks_something_is_refused_where_it_was_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"runtime=bubblewrap cannot be probed: .*apt-get install bubblewrap"):
        audit_sandboxes(["bubblewrap"])


def test_a_runtime_without_the_option_that_asks_for_probes_is_refused():
    with pytest.raises(ConfigError, match=r"--runtime=docker .*: add --sandbox"):
        doctor(runtime=["docker"])
