"""`--help` and `--cfg` say what there is: they are read from the code and the files that decide."""

from __future__ import annotations

import pytest
import yaml
from omegaconf import MISSING
from pydantic import BaseModel

from polar_gym.cli import main
from polar_gym.config.files import group_choices, recipe_names
from polar_gym.config.help import Key, field_docstrings, section_of, sections
from polar_gym.config.run_config import RunConfig
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.service.settings import ServeSettings


def every_key() -> dict[str, Key]:
    return {f"{section.name} {key.name}": key for section in sections() for key in section.keys}


def test_every_setting_has_a_description() -> None:
    services = [section_of("serve", ServeSettings, {}), section_of("gateway", GatewaySettings, {})]
    keys = [(section.name, key) for section in [*sections(), *services] for key in section.keys]
    assert [f"{section}: {key.name}" for section, key in keys if not key.description] == []


def test_every_group_choice_and_section_is_there() -> None:
    named = {section.name: section for section in sections()}
    assert set(RunConfig.model_fields) <= set(named)
    for group, files in group_choices().items():
        assert set(files) <= set(named[group].choices)
        assert all(named[group].choices[choice] for choice in files), "each says what it is"


def test_defaults_are_what_a_run_gets() -> None:
    keys = every_key()
    assert keys["engine=vllm engine.url"].default == MISSING
    assert keys["engine=embedded engine.max_model_len"].default is None
    assert keys["rollout rollout.num_samples"].default == 1
    assert keys["proxy proxy.splice"].type == "auto | off"


def test_a_docstring_belongs_to_the_field_above_it() -> None:
    class Base(BaseModel):
        one: int = 1
        """The one,
        in two lines."""
        two: int = 2

    class Derived(Base):
        two: int = 3
        """Now said."""

    assert field_docstrings(Derived) == {"one": "The one, in two lines.", "two": "Now said."}


def test_help_shows_every_group_key_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in (
        *recipe_names(),
        "--multirun",
        "harness=codex",
        "engine.url=...",
        "pools.postrun=2",
        "sampling.top_k=-1",
    ):
        assert name in said


def test_cfg_job_shows_the_composed_config_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    main_ends(["rollout", "demo", "--cfg", "job", "harness=codex", "rollout.output=${harness.name}.jsonl"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["rollout"]["output"] == "${harness.name}.jsonl"
    assert (shown["harness"]["name"], shown["runtime"]["name"]) == ("codex", "bubblewrap")
    main_ends(["rollout", "--cfg", "job", "--resolve", "rollout.output=${harness.name}.jsonl"])
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]["output"] == "pi.jsonl"


def test_cfg_of_a_sweep_shows_each_runs_config(capsys: pytest.CaptureFixture[str]) -> None:
    main_ends(["rollout", "-m", "recipe=swe_eval", "--cfg", "job", "harness=pi,codex"])
    shown = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["harness"]["name"] for each in shown] == ["pi", "codex"]
    assert {each["proxy"]["splice"] for each in shown} == {"off"}, "as it is typed: no YAML boolean"


def test_cfg_shows_what_is_still_missing(capsys: pytest.CaptureFixture[str]) -> None:
    main_ends(["rollout", "--cfg", "job", "engine=vllm"])
    assert yaml.safe_load(capsys.readouterr().out)["engine"]["url"] == MISSING


def main_ends(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
