"""Whatever is wrong with a config is said before anything starts: the key, the value, what is allowed."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from polar_gym.config.composition import compose_config, split_recipe, without_hydra
from polar_gym.config.files import group_choices, recipe_names
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import field_defaults
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import plays_tasks
from polar_gym.paths import shipped_dir
from polar_gym.schema import HarnessSpec, PluginSpec


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["harness=emacs"], r"harness='emacs': unknown harness; known: .*codex, .*pi"),
        (["rollout.samples=3"], r"rollout\.samples=3: unknown key; known here: .*num_samples"),
        (["speed=3"], r"speed=3: unknown key; known here: budget, builder, "),
        (["sampling.temperature=hot"], r"sampling\.temperature='hot': Input should be a valid number"),
        (["rollout.num_samples=0"], r"rollout\.num_samples=0: Input should be greater than 0"),
        (["harness.profile=tiny"], r"harness\.profile='tiny': Input should be 'default' or 'lean'"),
        (["engine.name=tpu"], r"engine\.name: unknown engine 'tpu'; known: embedded, sglang, vllm"),
        (["engine.wings=2"], r"engine\.wings=2: unknown key; known here: .*max_model_len"),
        (["engine=vllm"], r"engine\.url"),
        (["tasks=jsonl"], r"tasks\.path"),
        (["rollout"], r"'rollout': expected key=value"),
        (["budget.max_calls=[1,2"], r"budget\.max_calls"),
        (["harness=codex,pi"], r"harness=codex,pi: several values are a sweep, which needs --multirun"),
        (["cluster=local"], r"cluster=local: cluster is not part of a run; the groups of a run: harness, "),
        (["~budget.pace"], r"Could not delete.*budget\.pace"),
        (["+rollout.num_samples=2"], r"An item is already at 'rollout\.num_samples'"),
        (["rollout.output=${harness.nam}"], r"harness\.nam"),
        (["scoring.share=2"], r"scoring\.share=2: Input should be less than or equal to 1"),
        (["scoring.reference={name: tpu}"], r"scoring\.reference\.name: unknown engine 'tpu'; known: embedded, sglang"),
        (["scoring.reference={name: vllm, uri: x}"], r"scoring\.reference\.uri='x': unknown key; known here: .*url"),
        (
            ["harness=no.such:thing"],
            r"harness\.name: unknown harness 'no\.such:thing': No module named 'no'; .*PYTHONPATH",
        ),
        (
            ["harness=shlex:none"],
            r"harness\.name: unknown harness 'shlex:none': module 'shlex' has no attribute 'none'",
        ),
        (["harness=shlex:quote"], r"harness\.name: unknown harness 'shlex:quote': expected a Harness, got a function"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, overrides)


def test_an_unknown_recipe_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"recipe='dmeo': unknown recipe; known: .*demo"):
        load_config("dmeo")


def test_a_harness_that_can_be_told_a_date_is_told_the_day_on_which_the_run_begins() -> None:
    """In a group that runs past midnight, samples would begin with two prompts."""
    before = date.today()
    specs = [load_config(settings={"harness": harness}).harness for harness in ("pi", {"name": "claude_code"})]
    assert {spec.today for spec in specs} <= {before, date.today()}
    assert HarnessSpec.model_validate_json(specs[0].model_dump_json()) == specs[0], (
        "a node is told the date, not `auto`"
    )
    assert load_config(None, ["harness.today=2024-02-29"]).harness.today == date(2024, 2, 29)
    assert load_config(None, ["harness.today=null"]).harness.today is None
    assert load_config(None, ["harness=codex"]).harness.today is None
    with pytest.raises(ConfigError, match=r"harness\.today=2024-02-29: codex cannot be told a date; leave it out"):
        load_config(None, ["harness=codex", "harness.today=2024-02-29"])
    with pytest.raises(ConfigError, match=r"harness\.today='someday'"):
        load_config(None, ["harness.today=someday"])


@pytest.mark.parametrize("recipe", [None, *recipe_names()])
def test_what_ships_composes(recipe: str | None) -> None:
    needed = [] if recipe in (None, "demo", "learn") else ["engine.url=http://127.0.0.1:1"]
    assert load_config(recipe, needed).rollout.num_samples >= 1


@pytest.mark.parametrize(
    "group", [(group, choice) for group, choices in group_choices().items() for choice in choices], ids="=".join
)
def test_every_shipped_group_names_a_plugin_and_only_its_options(group: tuple[str, str]) -> None:
    kind, name = group
    needed: dict[str, Any] = {
        "vllm": {"url": "http://127.0.0.1:1"},
        "sglang": {"url": "http://127.0.0.1:1"},
        "jsonl": {"path": "x.jsonl"},
        "parquet": {"path": "x.parquet"},
        "harbor": {"path": "x"} if kind == "tasks" else {},
        "huggingface": {"dataset": "somebody/something"},
        "test_on_output": {"command": "ls"},
        "rubric": {"url": "http://127.0.0.1:1", "model": "m", "criteria": "[{name:a,text:b}]"},
        "nemo_gym": {"url": "http://127.0.0.1:1"},
        "composite": {"components": "{done:{name:session_completion}}"},
        "command": {"command": "ls"},
        "remote": {"provider": "ssh"},
        "unconfined": {"accept_no_isolation": True},
        "python": {"target": "package.module:function"},
    }.get(name, {})
    config = load_config(None, [f"{kind}={name}", *(f"{kind}.{key}={value}" for key, value in needed.items())])
    assert getattr(config, kind).name == name


def test_settings_choose_a_group_by_name_and_change_single_keys() -> None:
    config = load_config(settings={"harness": {"name": "codex", "profile": "lean"}, "runtime": "bubblewrap"})
    assert (config.harness.name, config.harness.profile, config.harness.model_name) == ("codex", "lean", "policy")
    assert config.runtime.name == "bubblewrap"


def test_a_setting_that_is_no_group_is_named() -> None:
    with pytest.raises(ConfigError, match="sandbox='docker': unknown key; known: harness, runtime"):
        load_config(settings={"sandbox": "docker"})


def test_overrides_win_over_the_recipe() -> None:
    config = load_config("demo", ["harness=codex", "rollout.output=/tmp/x.jsonl"])
    assert config.harness.name == "codex"
    assert config.rollout.output == Path("/tmp/x.jsonl")


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["+sampling.seed=3"], "sampling.seed", None),
        (["++sampling.seed=3"], "sampling.seed", 3),
        (["~sampling.temperature"], "sampling.temperature", 1.0),
        (["rollout.output=out/${harness.name}.jsonl", "harness=codex"], "rollout.output", Path("out/codex.jsonl")),
        (["rollout.output='a b,c.jsonl'"], "rollout.output", Path("a b,c.jsonl")),
        (["proxy.splice=off"], "proxy.splice", "off"),
        (['harness.model_name="gpt, 5"'], "harness.model_name", "gpt, 5"),
        (["tasks.instance_ids=[a,'b,c']"], "tasks.instance_ids", ["a", "b,c"]),
    ],
)
def test_overrides_mean_what_they_mean_in_hydra(overrides: list[str], key: str, value: Any) -> None:
    if value is None:  # the key is there, so there is nothing to add
        assert load_config(None, overrides).sampling.seed == 3
        return
    section, name = key.split(".")
    found = getattr(load_config(None, overrides), section)
    assert (found.options[name] if section == "tasks" else getattr(found, name)) == value


def test_interpolation_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TEST_SCRATCH", "/scratch")
    config = load_config(None, ["rollout.output=${oc.env:POLAR_TEST_SCRATCH}/x.jsonl"])
    assert config.rollout.output == Path("/scratch/x.jsonl")


def test_a_plug_in_without_a_file_is_a_choice_of_its_group_by_its_import_path() -> None:
    """Its options are its own: none of the default choice's are left over."""
    config = load_config(None, ["harness=tests.e2e.broken_harness:CRASHING"])
    assert (config.harness.name, config.harness.options) == ("tests.e2e.broken_harness:CRASHING", {})
    assert load_config(settings={"harness": "tests.e2e.broken_harness:CRASHING"}).harness == config.harness


def test_a_plug_in_without_a_file_is_chosen_by_the_name_in_a_mapping() -> None:
    """Guards against a refusal of the default choice's options, which the user did not set."""
    name = "polar_gym.engines.sglang:ENGINE"
    config = load_config(settings={"engine": {"name": name, "url": "http://127.0.0.1:1"}})
    assert config.engine == load_config(None, [f"engine={name}", "engine.url=http://127.0.0.1:1"]).engine
    assert "policy" not in config.engine.options


def test_a_scripted_engine_without_a_file_plays_the_tasks_too() -> None:
    """Guards against an engine without a script, because only the default choice's file names the policy."""
    for options, plays in [({}, True), ({"scripts": []}, False)]:
        engine = {"name": "polar_gym.conformance.acting:Delegating", **options}
        assert plays_tasks(load_config(settings={"engine": engine}).engine) is plays
    assert not plays_tasks(PluginSpec.model_validate({"name": "vllm", "url": "http://127.0.0.1:1"}))


def test_a_directory_of_ones_own_adds_recipes_and_choices(tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "slim.yaml").write_text("name: codex\nprofile: lean\n")
    (tmp_path / "night.yaml").write_text(
        "defaults:\n  - config\n  - override harness: slim\n  - _self_\npools: {run: 9}\n"
    )
    config = load_config("night", config_dir=tmp_path)
    assert (config.harness.name, config.harness.profile, config.pools.run) == ("codex", "lean", 9)
    assert load_config(None, ["harness=slim"], config_dir=tmp_path).harness.profile == "lean"
    with pytest.raises(ConfigError, match="recipe='day': unknown recipe; known: demo, learn, night"):
        load_config("day", config_dir=tmp_path)


@pytest.mark.parametrize(("name", "recipe"), [("demo.yaml", "demo"), ("harness/pi.yaml", None), ("config.yaml", None)])
def test_a_file_of_ones_own_with_a_shipped_name_is_refused(tmp_path: Path, name: str, recipe: str | None) -> None:
    """Guards against an adapted copy that has no effect, because the shipped file comes first."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("name: codex\n")
    with pytest.raises(ConfigError, match=rf"--config-dir: .*{name}: a shipped file has this name"):
        load_config(recipe, config_dir=tmp_path)


def test_files_that_are_no_configs_may_have_any_name(tmp_path: Path) -> None:
    """Guards against a directory that is refused for a file which no run reads, and against the shipped one."""
    shipped = shipped_dir("recipes")
    for path in ("deploy/kubernetes.yaml", "nemo_rl/grpo_codex.yaml"):
        assert (shipped / path).exists()
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    for directory in (tmp_path, shipped):
        assert load_config("demo", config_dir=directory) == load_config("demo")


@pytest.mark.parametrize("arguments", [["swe_eval", "recipe=demo"], ["recipe=demo", "recipe=swe_eval"]])
def test_two_recipes_are_refused(arguments: list[str]) -> None:
    """Guards against a run of the other one, without a word."""
    with pytest.raises(ConfigError, match="are 2 recipes; name one"):
        split_recipe(arguments)


def test_a_setting_of_sweeps_alone_is_refused_without_one() -> None:
    for setting in ("hydra.sweep.dir=x", "hydra/launcher=basic"):
        with pytest.raises(ConfigError, match=rf"{setting}: has no effect on one run; .* --multirun"):
            load_config("demo", [setting])


def test_a_default_stands_in_the_record_alone_and_is_in_the_composed_config() -> None:
    """A default in two places would be two defaults as soon as one of them is changed."""
    composed = OmegaConf.to_container(without_hydra(compose_config()))
    assert isinstance(composed, dict)
    defaults = field_defaults()
    for section in ("sampling", "budget", "rollout", "pools", "proxy"):
        assert composed[section] == defaults[section]
    assert {**defaults["harness"], "name": "pi", "today": "auto"} == composed["harness"], "a file of the group wins"
    for file in shipped_dir("conf").glob("*/*.yaml"):
        values = OmegaConf.load(file)
        assert isinstance(values, DictConfig)
        repeated = {key for key, value in defaults.get(file.parent.name, {}).items() if values.get(key) == value}
        assert repeated == set(), file
