"""Sweeps: which runs a command line means, where each puts its files, and what one that cannot start does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polar_gym.cli import main
from polar_gym.config.composition import SweepRun, sweep
from polar_gym.engines import http
from polar_gym.errors import ConfigError
from polar_gym.runs.state import state_of
from polar_gym.runs.sweep import plan


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_combination_is_a_run_and_the_last_value_varies_fastest() -> None:
    runs = sweep(["harness=codex,pi", "rollout.num_samples=2", "sampling.seed=range(0,2)"])
    assert [run.varied for run in runs] == [
        [f"harness={harness}", f"sampling.seed={seed}"] for harness in ("codex", "pi") for seed in (0, 1)
    ]
    assert all("rollout.num_samples=2" in run.overrides for run in runs)


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("engine=glob(*lan*)", ["engine=sglang"]),
        ("sampling.top_p=choice(0.9,1.0)", ["sampling.top_p=0.9", "sampling.top_p=1.0"]),
        ("harness.model_name='a,b'", ["harness.model_name='a,b'"]),
        ("tasks.instance_ids=[a,b]", ["tasks.instance_ids=[a,b]"]),
        ("+harness.note='a,b',c", ["+harness.note='a,b'", "+harness.note=c"]),
    ],
)
def test_what_a_sweep_is_follows_hydras_grammar(override: str, values: list[str]) -> None:
    assert [run.overrides for run in sweep([override])] == [[value] for value in values]


def test_a_run_without_choices_is_a_sweep_of_one() -> None:
    assert sweep(["harness=codex"]) == [SweepRun(["harness=codex"], [])]


def test_each_run_has_its_own_directory_with_its_files_in_it() -> None:
    runs = plan(["demo", "harness=codex,pi", "rollout.state=journals", "hydra.sweep.dir=sweeps/one"])
    assert [run.directory for run in runs] == [Path("sweeps/one/0"), Path("sweeps/one/1")]
    for run in runs:
        assert run.config.rollout.output == run.directory / "demo.jsonl"
        assert run.config.rollout.state == run.directory / "journals"
    assert [run.config.harness.name for run in runs] == ["codex", "pi"]


def test_hydras_own_names_for_the_directories_are_understood() -> None:
    runs = plan(["harness=codex,pi", "hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.override_dirname}"])
    assert [run.directory for run in runs] == [Path("s/harness=codex"), Path("s/harness=pi")]
    assert len({run.directory.parent for run in plan(["sampling.seed=1,2,3"])}) == 1, "one time stamp for all"


def test_the_settings_of_a_run_are_written_without_its_keys() -> None:
    """Guards against keys in files that all users of the machine may read, and that stay."""
    own = ["engine.url=http://127.0.0.1:1", "engine.api_key=sk-secret", "engine.patience_seconds=0.1"]
    with pytest.raises(SystemExit):
        main(["rollout", "-m", "demo", "engine=vllm", *own, "hydra.sweep.dir=s"])
    written = {path.name: path.read_text() for path in Path("s").rglob("*.yaml")}
    assert all("sk-secret" not in text for text in written.values())
    assert yaml.safe_load(written["config.yaml"])["engine"]["api_key"] == "hidden"
    assert "engine.api_key=hidden" in yaml.safe_load(written["overrides.yaml"])


def test_a_recipe_can_be_what_varies() -> None:
    runs = plan(["recipe=swe_rollout,swe_eval", "engine.url=http://127.0.0.1:1"])
    assert [run.config.proxy.splice for run in runs] == ["auto", "off"]


def test_runs_that_would_write_to_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.output='/tmp/x\.jsonl': several runs .* would write to it"):
        plan(["harness=codex,pi", "rollout.output=/tmp/x.jsonl"])
    runs = plan(["harness=codex,pi", "rollout.output=/tmp/${harness.name}.jsonl"])
    assert [run.config.rollout.output for run in runs] == [Path("/tmp/codex.jsonl"), Path("/tmp/pi.jsonl")]
    with pytest.raises(ConfigError, match=r"rollout\.state='/tmp/journals': several runs .* would write to it"):
        plan(["harness=codex,pi", "rollout.state=/tmp/journals"])
    runs = plan(["sampling.temperature=0.5,0.7", "rollout.output=/tmp/t${sampling.temperature}"])
    assert [state_of(run.config) for run in runs] == [Path("/tmp/t0.5.state"), Path("/tmp/t0.7.state")]


def test_a_wrong_run_stops_the_sweep_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "--multirun", "rollout.num_samples=1,0"])
    assert ended.value.code == 2
    assert "rollout.num_samples=0: Input should be greater than 0" in capsys.readouterr().err
    assert not Path("multirun").exists()


def test_runs_whose_engine_does_not_answer_are_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "START_PATIENCE_SECONDS", 0.1)
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "-m", "engine=vllm", "engine.url=http://127.0.0.1:1,http://127.0.0.1:2", "hydra.sweep.dir=s"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert said.count("error: vLLM at") == 2
    assert "run 2 of 2: engine.url=http://127.0.0.1:2" in said
    for number in ("0", "1"):
        settings = Path("s", number, ".hydra")
        assert "engine=vllm" in yaml.safe_load((settings / "overrides.yaml").read_text())
        engine = yaml.safe_load((settings / "config.yaml").read_text())["engine"]
        assert engine["url"] == f"http://127.0.0.1:{int(number) + 1}"
