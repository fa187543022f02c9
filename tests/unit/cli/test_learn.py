"""`polar-gym learn` refuses what it cannot train on before anything starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli.learn import app
from polar_gym.errors import ConfigError, how_to_install


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_an_unknown_family_is_refused() -> None:
    assert _refused("--family", "chess") == "--family=chess: unknown; known: trail, repair"


def test_tasks_of_ones_own_need_a_model_and_no_family(tmp_path: Path) -> None:
    own = ["tasks=jsonl", f"tasks.path={tmp_path / 'x.jsonl'}"]
    assert _refused(*own) == "engine.model_path: is required for tasks of your own, a directory with a model"
    assert "drop one of them" in _refused("--family", "trail", *own)


@pytest.mark.parametrize(("settings", "warned"), [([], True), (["budget.max_sampled_tokens=4096"], False)])
def test_limits_of_the_small_tasks_on_tasks_of_ones_own_are_told(
    tmp_path: Path, settings: list[str], warned: bool
) -> None:
    """Guards against a model that is trained on rewards of 0 alone: every real session passes 512 tokens."""
    own = ["tasks=jsonl", f"tasks.path={tmp_path / 'x.jsonl'}", f"engine.model_path={tmp_path}"]
    (tmp_path / "plan.json").write_text("{}\n")
    result = CliRunner().invoke(app, [*own, *settings, "--out", os.fspath(tmp_path)])
    assert ("budget.max_sampled_tokens=512: the recipe's" in result.stderr) == warned


def test_a_harness_that_is_named_twice_is_refused() -> None:
    expected = "--also, --test-on: codex, pi: named twice; name each harness once"
    assert _refused("--also", "pi", "--test-on", "codex", "--test-on", "pi") == expected


def test_another_engine_is_refused() -> None:
    assert "engine=vllm: the loop gives weights" in _refused("engine=vllm", "engine.url=http://127.0.0.1:1")


def test_sampling_that_the_trainer_does_not_know_is_refused() -> None:
    """Guards against a run that stops after its first sessions because of an engine with other weights, which is
    false."""
    assert _refused("sampling.temperature=0.6", "sampling.top_k=20", "sampling.seed=1") == (
        "sampling.temperature=0.6, sampling.top_k=20: the loop trains the model's own distribution; drop the setting, "
        "or write sampling.temperature=1.0, sampling.top_k=-1"
    )


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("rollout.num_samples=16", "a group has 8 sessions of a task"),
        ("rollout.output=x.jsonl", "the episodes are in the directory of --out"),
        ("engine.slots=64", "each session has a slot; set --places"),
        ("engine.dtype=bfloat16", "trainer and engine compute in float32"),
        ("pools.run=2", "each place runs a session; set --places"),
        ("tasks.limit=3", "a family makes its own tasks, which --seed chooses"),
    ],
)
def test_a_setting_that_the_loop_does_not_use_is_refused(setting: str, why: str) -> None:
    """Guards against settings that are taken and change nothing."""
    assert _refused(setting) == f"{setting}: has no effect here: {why}; drop the setting"


def test_an_unknown_setting_is_refused() -> None:
    assert "rollout.speed" in _refused("rollout.speed=9")


def test_a_directory_with_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}\n")
    assert "a run with other arguments is there" in _refused("--out", os.fspath(tmp_path))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, find = ("torch", "transformers", "pyarrow"), importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in parts else find(name, *rest))
    assert _refused("--out", os.fspath(tmp_path / "run")) == (
        f"torch, transformers, pyarrow: missing; install with: {how_to_install('torch', 'export')}"
    )


def test_a_package_that_is_missing_at_import_is_named() -> None:
    """Guards against a traceback on a machine with the core alone."""
    program = "import sys; sys.modules['pyarrow'] = None; from polar_gym.cli import main; main(['learn'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert how_to_install("torch", "export") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    """Guards against a traceback of transformers."""
    assert _refused(f"engine.model_path={tmp_path}", "--out", os.fspath(tmp_path / "out")) == (
        f"engine.model_path={tmp_path}: is no directory of a model, which has config.json; name one"
    )


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_run_has_steps(steps: str) -> None:
    result = CliRunner().invoke(app, ["--steps", steps])
    assert result.exit_code == 2
