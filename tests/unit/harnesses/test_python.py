"""What `harnesses/python.py` describes; that it runs is in `tests/e2e/test_own_harness.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.harnesses import python as python_module
from polar_gym.harnesses.install import InstallError
from polar_gym.harnesses.python import HARNESS
from tests.support.harness_context import context

ROOT = "/home/agent/.polar-gym/agent"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to import from that is not the sandbox's."""
    for name, text in (("single_agent.py", "s"), ("own_agent/__init__.py", ""), ("own_agent/deep/loop.py", "l"),
                       ("own_agent/prompt.md", "é"), ("own_agent/__pycache__/loop.pyc", "x")):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_file_is_copied(own: Path):
    launch = HARNESS.launch(context(target=f"{own}/single_agent.py:solve"))
    assert launch.files == {f"{ROOT}/single_agent.py": "s"}
    assert launch.argv[3:] == [ROOT, "single_agent", "solve", "http://127.0.0.1:8080", "secret-key", "policy"]
    assert launch.environment["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert launch.stdin.decode() == "-do 'é'\n"


def test_a_package_is_copied_whole(own: Path):
    launch = HARNESS.launch(context(target="own_agent.deep.loop:solve"))
    package = {"own_agent/__init__.py": "", "own_agent/deep/loop.py": "l", "own_agent/prompt.md": "é"}
    assert launch.files == {f"{ROOT}/{name}": text for name, text in package.items()}
    assert launch.argv[4:6] == ["own_agent.deep.loop", "solve"]


def test_a_module_of_one_file_is_copied_alone(own: Path):
    assert HARNESS.launch(context(target="single_agent:solve")).files == {f"{ROOT}/single_agent.py": "s"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere/agent.py:solve", "there is no file /.*/nowhere/agent.py on the gateway's machine"),
        ("no_such_package.agent:solve", "no package 'no_such_package' of Python files can be imported"),
        ("sys:exit", "no package 'sys' of Python files can be imported"),
    ],
)
def test_what_is_not_there_is_named(target: str, message: str):
    with pytest.raises(InstallError, match=message):
        HARNESS.launch(context(target=target))


def test_what_cannot_be_copied_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch):
    (own / "own_agent/binary").write_bytes(b"\xff")
    with pytest.raises(InstallError, match="not UTF-8 text"):
        HARNESS.launch(context(target="own_agent:solve"))
    monkeypatch.setattr(python_module, "MAX_BYTES", 2)
    with pytest.raises(InstallError, match="4 bytes, more than the 2 that are copied"):
        HARNESS.launch(context(target="own_agent:solve"))


@pytest.mark.parametrize("target", ["agent.py", "package.module", "package.module:", "a.py:two words", ":solve"])
def test_a_target_without_a_function_is_an_error_of_the_config(target: str):
    with pytest.raises(ConfigError, match=r"harness\.target=.*expected package\.module:function or path"):
        load_config(settings={"harness": {"name": "python", "target": target}})
