"""`polar-gym doctor` on this machine as it is, and as it would be with programs missing."""

from __future__ import annotations

import importlib
import io
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Literal

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from polar_gym.cli import app, doctor
from polar_gym.cli.doctor import Check, can_run, diagnose, render
from polar_gym.harnesses import HARNESSES, install
from polar_gym.runtimes import RUNTIMES
from tests.support.requirements import need_bubblewrap, need_program


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def printed(checks: list[Check]) -> str:
    """The table as a wide terminal shows it."""
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(checks))
    return console.export_text()


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that holds nothing; what it returns is the directory, for programs to be put in.

    This Python's environment may hold node, too.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    return programs


def test_every_registered_runtime_and_harness_is_examined(tmp_path: Path) -> None:
    names = by_name(diagnose(cache=tmp_path)).keys()
    assert names >= {f"runtime {name}" for name in RUNTIMES.names()}
    assert names >= {f"harness {name}" for name in HARNESSES.names()}


@pytest.mark.parametrize(("fix", "code"), [("", 0), ("start vLLM", 1)])
def test_an_engine_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, fix: str, code: int) -> None:
    """Guards against a job that goes on after `polar-gym doctor --engine-url URL`, without an engine."""
    checks = [Check("node and npm", "", "", kind="node"), Check("runtime docker", "", "", kind="runtime")]
    checks.append(Check("engine URL", "", "", fix, "engine"))
    monkeypatch.setattr(doctor, "diagnose", lambda engine_url: checks)
    ended = CliRunner().invoke(app, ["doctor", "--engine-url", "http://127.0.0.1:1"])
    assert ended.exit_code == code


def test_a_runtime_that_must_be_accepted_is_no_usable_one(tmp_path: Path) -> None:
    """Guards against a doctor that ends in a traceback, because a runtime cannot be made without an option."""
    unconfined = by_name(diagnose(cache=tmp_path))["runtime unconfined"]
    assert not unconfined.ok
    assert "isolates nothing" in unconfined.fix


def test_a_check_has_a_fix_exactly_when_it_is_not_ok(tmp_path: Path) -> None:
    for check in diagnose(cache=tmp_path, engine_url="http://127.0.0.1:1"):
        assert check.ok == (not check.fix), check


def test_a_machine_with_node_and_bubblewrap_can_run(tmp_path: Path) -> None:
    need_bubblewrap()
    need_program("node", "apt-get install nodejs npm && npm install --global node@22")
    checks = diagnose(cache=tmp_path)
    assert by_name(checks)["runtime bubblewrap"].ok
    assert can_run(checks)
    assert "can run: polar-gym rollout demo" in printed(checks)


def test_without_programs_each_is_named_with_what_installs_it(bare_path: Path, tmp_path: Path) -> None:
    checks = diagnose(cache=tmp_path)
    assert not can_run(checks)
    found = by_name(checks)
    for name in ("node and npm", "git", "ripgrep", "runtime bubblewrap", "runtime docker", "harness pi"):
        assert not found[name].ok, found[name]
    text = printed(checks)
    for fix in ("apt-get install nodejs npm", "apt-get install git", "bubblewrap", "cannot run harnesses yet"):
        assert fix in text


def test_a_node_that_is_too_old_is_refused_with_its_version(bare_path: Path, tmp_path: Path) -> None:
    """Debian 12's own node is 18: harnesses start on it and die later, with syntax errors."""
    old = bare_path / "node"
    old.write_text("""#!/bin/sh\ncase $1 in --version) echo v18.19.0 ;; *) echo "18.19.0 $0" ;; esac\n""")
    old.chmod(0o755)
    node = by_name(diagnose(cache=tmp_path))["node and npm"]
    assert not node.ok
    assert node.found == "v18.19.0"
    assert "18.19.0" in node.fix


def part(kind: Literal["node", "runtime"], *, ok: bool) -> Check:
    return Check(name=kind, kind=kind, found="", needed_for="", fix="" if ok else "install it")


def test_a_run_takes_node_and_any_one_runtime() -> None:
    assert can_run([part("node", ok=True), part("runtime", ok=False), part("runtime", ok=True)])
    assert not can_run([part("node", ok=False), part("runtime", ok=True)])
    assert not can_run([part("node", ok=True), part("runtime", ok=False)])


def test_a_harness_in_the_cache_needs_no_npm(bare_path: Path, tmp_path: Path) -> None:
    install.place(HARNESSES.get("pi"), tmp_path).mkdir(parents=True)
    found = by_name(diagnose(cache=tmp_path))
    assert found["harness pi"].ok
    assert not found["harness codex"].ok


def test_a_runtime_whose_import_fails_is_named_and_hides_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "broken.py").write_text("import a_package_that_nobody_has\nRUNTIME = None\n")
    package = importlib.import_module("polar_gym.runtimes")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(room)])
    found = by_name(diagnose(cache=tmp_path))
    assert "a_package_that_nobody_has" in found["runtime broken"].found
    assert "runtime bubblewrap" in found


class ModelListing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "policy"}]}' if known else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_an_engine_that_answers_is_named_with_its_models(tmp_path: Path, suffix: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelListing) as server:
        Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}{suffix}"
            engine = by_name(diagnose(cache=tmp_path, engine_url=url))[f"engine {url}"]
        finally:
            server.shutdown()
    assert engine.ok
    assert engine.found.startswith("serves policy; whether it has a grammar of its own is not known (")


NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class WithoutParser(ModelListing):
    """Answers as vLLM 0.32 does without a tool-call parser."""

    def do_POST(self) -> None:
        asked = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if "tools" in asked else 200)
        self.end_headers()
        error = {"message": NO_PARSER, "type": "BadRequestError", "param": None, "code": 400}
        self.wfile.write(orjson.dumps({"error": error}))


def test_an_engine_that_refuses_tools_is_named_with_the_missing_flags(tmp_path: Path) -> None:
    """Guards against a run of harnesses on a server that takes none of their requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutParser) as server:
        Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            engine = by_name(diagnose(cache=tmp_path, engine_url=url))[f"engine {url}"]
        finally:
            server.shutdown()
    assert not engine.ok
    assert engine.found == f"serves policy; refuses tools ({NO_PARSER})"
    assert engine.fix == "start vLLM with these flags, and the parser of its model"


def test_an_engine_that_does_not_answer_is_said_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    engine = by_name(diagnose(cache=tmp_path, engine_url=url))[f"engine {url}"]
    assert not engine.ok
    assert "Connection refused" in engine.found


def test_a_cache_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet"
    assert by_name(diagnose(cache=cache))["cache"].ok
    assert not cache.parent.exists()
