"""`polar-gym harness check`: wrong words are named before anything starts, and a missing version is a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polar_gym.cli import main
from polar_gym.conformance.versions import newest
from polar_gym.errors import ConfigError
from polar_gym.harnesses import HARNESSES
from tests.support.requirements import need_bubblewrap, need_program


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["harness", "check", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "unknown harness 'nope'; known: claude_code,"),
        (["pi", "--row", "nope"], "--row='nope': unknown row; known: wire,"),
        (["pi", "--runtime", "podman"], "--runtime='podman': unknown runtime; known: apptainer,"),
        (["command@1", "--runtime", "bubblewrap"], "command@1: command is no package, so it has no version"),
        (["python"], "harness.target: is required"),
        (["python", "harness.target=agent.py"], "harness.target='agent.py': expected package.module:func"),
        (["python", "target=agent.py:run"], "target=agent.py:run: expected harness.KEY=VALUE"),
        (["pi@1", "--newest", "--runtime", "bubblewrap"], "pi@1: name a version or --newest, not both"),
    ],
)
def test_wrong_words_are_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    need_bubblewrap()
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["pi", "mini_swe_agent"])
def test_without_a_registry_nothing_is_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No registry answers, as on a machine without a network."""
    need_bubblewrap()
    need_program("npm", "apt-get install nodejs npm")
    closed = "http://127.0.0.1:9"
    values = {"POLAR_GYM_CACHE": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}
    values |= {
        "npm_config_registry": closed,
        "npm_config_fetch_retries": "0",
        "npm_config_cache": str(tmp_path / "npm"),
    }
    for variable, value in (values | {"PIP_INDEX_URL": closed}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    code, out, _ = run(capsys, name, "--runtime", "bubblewrap", "--json")
    (report,) = json.loads(out)
    (row,) = report["rows"]
    assert (code, row["check"], row["verdict"]) == (1, "installation", "fail")
    assert " failed (exit code 1): " in row["reason"]
    with pytest.raises(ConfigError, match=r"the newest version of .* is not known; is its registry reachable\?"):
        newest(HARNESSES.get(name))
