"""Whole episodes with harnesses of one's own: a command line, and a Python function by file and by import path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_gym.schema import Episode
from tests.e2e.play import make, play
from tests.support.requirements import need_bubblewrap, need_program

AGENT = Path(__file__).with_name("own_agent.py")

CURL = """\
curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d '{"model": "'"$POLAR_GYM_MODEL"'", "messages": [{"role": "user", "content": "say hello"}]}'
"""


@pytest.fixture
def bubblewrap() -> str:
    need_bubblewrap()
    return "bubblewrap"


def _episode(tmp_path: Path, runtime: str, **harness: Any) -> tuple[float, Episode]:
    env = make(tmp_path, harness=harness, runtime=runtime)
    try:
        reward, _, _, episode = play(env)
    finally:
        env.close()
    return reward, episode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`my_agents.first`, importable here."""
    package = tmp_path / "imported" / "my_agents"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from .second import solve as solve\n")
    (package / "second.py").write_text(AGENT.read_text())
    monkeypatch.syspath_prepend(str(package.parent))


@pytest.mark.parametrize("target", [f"{AGENT}:solve", "my_agents.first:solve"])
@pytest.mark.usefixtures("package")
def test_a_python_function_solves_a_task(bubblewrap: str, target: str, tmp_path: Path) -> None:
    reward, episode = _episode(tmp_path, bubblewrap, name="python", target=target)
    assert reward == 1.0, episode.session.failure
    (trace,) = episode.trajectory.traces
    assert len(trace.call_ids) == episode.trajectory.fidelity.calls >= 3
    assert episode.trajectory.fidelity.excluded == {}


def test_a_python_function_that_is_not_there_is_named(bubblewrap: str, tmp_path: Path) -> None:
    _, episode = _episode(tmp_path, bubblewrap, name="python", target=f"{AGENT}:resolve")
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"
    assert "module 'own_agent' has no attribute 'resolve'" in episode.session.failure.message


def test_a_python_file_that_is_not_there_is_named(bubblewrap: str, tmp_path: Path) -> None:
    _, episode = _episode(tmp_path, bubblewrap, name="python", target=f"{tmp_path}/gone.py:solve")
    assert episode.session.failure is not None
    assert f"there is no file {tmp_path}/gone.py" in episode.session.failure.message


def test_a_shell_command_finds_its_model_in_the_environment(bubblewrap: str, tmp_path: Path) -> None:
    need_program("curl", "apt-get install curl")
    _, episode = _episode(tmp_path, bubblewrap, name="command", command=CURL)
    assert episode.session.failure is None
    assert episode.session.exit_code == 0
    assert episode.trajectory.fidelity.calls == 1
    (trace,) = episode.trajectory.traces
    assert trace.trainable_tokens > 0
    assert episode.artifacts.final_message in episode.artifacts.stdout


def test_a_list_of_arguments_solves_a_task(bubblewrap: str, tmp_path: Path) -> None:
    """The program's source is one of them, because nothing of it is in the sandbox; what look like placeholders in its
    f-strings are placeholders too."""
    program = f"{AGENT.read_text()}\nimport sys\nsolve(*sys.argv[1:])\n"
    command = ["python3", "-c", program, "{instruction}", "{base_url}", "{api_key}", "{model}"]
    reward, episode = _episode(tmp_path, bubblewrap, name="command", command=command)
    assert reward == 1.0, episode.session.failure
    assert len(episode.trajectory.traces) == 1
