"""What ships as a recipe runs as it is named, and NeMo RL's recipes hold only keys that NeMo RL knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from polar_gym.builders import BUILDERS
from polar_gym.config.files import recipe_names
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.episodes.ablation import cost, recorded_sessions
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.nemo import component_root
from polar_gym.nemo.rollouts import AgentSettings, run_configs
from polar_gym.paths import shipped_dir
from polar_gym.schema import BuilderSpec
from tests.support.calls import make_call
from tests.support.episodes import make_episode

CLI_HARNESSES = ("claude_code", "codex", "gemini_cli", "opencode", "pi", "qwen_code")
TRAINED = ("claude_code", "codex", "pi", "qwen_code")
"""The harnesses of the paper's training runs."""
NEMO_RL = sorted((shipped_dir("recipes") / "nemo_rl").glob("grpo_*.yaml"))
KNOWN = yaml.safe_load((Path(__file__).parent / "nemo_rl" / "known_keys.yaml").read_text(encoding="utf-8"))
BASE = "examples/configs/grpo_math_8B_megatron.yaml"
README = (shipped_dir("recipes") / "README.md").read_text(encoding="utf-8")


def loaded(recipe: str, *overrides: str) -> RunConfig:
    return load_config(recipe, [*overrides, *(["engine.url=http://127.0.0.1:1"] if recipe != "demo" else [])])


@pytest.mark.parametrize("harness", CLI_HARNESSES)
def test_each_harness_has_a_rollout_and_an_evaluation_that_serves_as_deployed(harness: str) -> None:
    rollout, evaluation = (loaded(f"swe_{kind}", f"harness={harness}") for kind in ("rollout", "eval"))
    assert rollout.harness.name == evaluation.harness.name == harness
    assert (rollout.proxy.splice, evaluation.proxy.splice) == ("auto", "off")
    assert rollout.rollout.output != evaluation.rollout.output


def test_a_recipes_harness_can_be_another_and_the_output_follows() -> None:
    config = loaded("swe_rollout", "harness=claude_code", "rollout.num_samples=4")
    assert (config.harness.name, config.rollout.num_samples) == ("claude_code", 4)
    assert config.rollout.output == Path("outputs/claude_code_rollout.jsonl")


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_readme_says_what_each_recipe_is(recipe: str) -> None:
    assert f"**{recipe}**" in README


def composed_as_nemo_rl_does(path: Path) -> DictConfig:
    """Its inheritance: `defaults` first, a section marked `_override_` in place of the parent's."""
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    if "defaults" not in config:
        return config
    parents = config.pop("defaults")
    names = parents if isinstance(parents, ListConfig) else [parents]
    base = OmegaConf.merge(*(composed_as_nemo_rl_does(path.parent / str(name)) for name in names))
    assert isinstance(base, DictConfig)
    for key in config:
        section = config[key]
        if isinstance(section, DictConfig) and section.pop("_override_", False):
            base.pop(key, None)
    merged = OmegaConf.merge(base, config)
    assert isinstance(merged, DictConfig)
    return merged


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of it, as far as recipes need one: the file that they begin with, here without any key."""
    base = tmp_path / BASE
    base.parent.mkdir(parents=True)
    base.write_text("env: {math: {num_workers: 8}}\ndata: {train: {dataset_name: OpenMathInstruct-2}}\n")
    monkeypatch.setenv("NEMO_RL", str(tmp_path))
    monkeypatch.setenv("POLAR_DATA", "/data")
    return tmp_path


def plain(config: DictConfig | ListConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def keys(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(section, key) of everything that is set, down to the open sections."""
    for key, value in values.items():
        yield prefix, key
        section = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, dict) and not KNOWN.get(section, {}).get("open"):
            yield from keys(value, section)


def test_there_are_grpo_recipes_for_each_harness_of_the_paper() -> None:
    of_harnesses = {f"grpo_{harness}{traces}" for harness in TRAINED for traces in ("", "_all_traces", "_async")}
    assert {path.stem for path in NEMO_RL} == {"grpo_swe", *of_harnesses}


@pytest.mark.parametrize("harness", TRAINED)
def test_a_recipe_for_all_traces_differs_in_one_key(nemo_rl: Path, harness: str) -> None:
    """`recipes/nemo_rl/run_grpo.py` reads the key, and so does a later NeMo RL."""
    recipes = shipped_dir("recipes") / "nemo_rl"
    main, every = (
        plain(composed_as_nemo_rl_does(recipes / f"grpo_{harness}{end}.yaml")) for end in ("", "_all_traces")
    )
    assert every["grpo"].pop("gym_multi_trace") is True
    assert every == main


@pytest.mark.parametrize("end", ["", "_async"])
@pytest.mark.parametrize("harness", TRAINED)
def test_grpo_recipes_hold_only_keys_that_nemo_rl_knows(nemo_rl: Path, harness: str, end: str) -> None:
    composed = composed_as_nemo_rl_does(shipped_dir("recipes") / "nemo_rl" / f"grpo_{harness}{end}.yaml")
    values = plain(composed)
    unknown = [f"{section}.{key}" for section, key in keys(values) if section and key not in KNOWN[section]["keys"]]
    assert unknown == []
    assert "math" not in values["env"], "NeMo RL's own section is replaced, not added to"


def test_a_key_that_nemo_rl_does_not_know_is_found() -> None:
    """The check itself can fail: NeMo RL would ignore these in silence."""
    found = [(section, key) for section, key in keys({"policy": {"generation": {"top_kk": 1}}, "grpo": {"speed": 1}})]
    assert [key for section, key in found if section and key not in KNOWN[section]["keys"]] == ["top_kk", "speed"]


@pytest.mark.parametrize("harness", TRAINED)
def test_grpo_recipes_have_the_papers_hyper_parameters(nemo_rl: Path, harness: str) -> None:
    config = composed_as_nemo_rl_does(shipped_dir("recipes") / "nemo_rl" / f"grpo_{harness}.yaml")
    assert config.policy.model_name == "Qwen/Qwen3.5-4B"
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (4, 16)
    assert config.policy.train_global_batch_size == 4 * 16, "one update a step"
    assert config.grpo.max_num_epochs == 1


@pytest.mark.parametrize("harness", TRAINED)
def test_the_agent_servers_of_a_grpo_recipe_accept_their_config(nemo_rl: Path, harness: str) -> None:
    """As NeMo Gym starts them: the recipe's block on top of the environment's, the policy's URLs as a list."""
    composed = composed_as_nemo_rl_does(shipped_dir("recipes") / "nemo_rl" / f"grpo_{harness}.yaml")
    gym = plain(composed)["env"]["nemo_gym"]
    assert gym["config_paths"][0].endswith("vllm_model_for_training.yaml")
    shipped = [OmegaConf.load(component_root() / path) for path in gym["config_paths"][1:]]
    policy = {"policy_base_url": ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"], "policy_model_name": "policy"}
    servers = OmegaConf.merge(policy, *shipped, {name: gym[name] for name in gym if name.startswith("polar_")})
    configs = {}
    for name in ("polar_swe_agent", "polar_swe_eval_agent"):
        server = plain(servers)[name]["responses_api_agents"]["polar_agent"]
        settings = AgentSettings.model_validate(
            {key: server[key] for key in AgentSettings.model_fields if key in server}
        )
        configs[name] = run_configs(settings)
        assert len(configs[name]) == 2, "a node for each replica"
        for config in configs[name]:
            assert (config.harness.name, config.builder.name) == (harness, "prefix_merging")
            assert config.engine.options["prefix_field"] == "required_prefix_token_ids"
            assert config.scoring.share is None, "NeMo RL's server has no route that scores"
    assert configs["polar_swe_agent"][0].proxy.splice == "auto"
    assert configs["polar_swe_eval_agent"][0].proxy.splice == "off"
    assert configs["polar_swe_agent"][0].tasks != configs["polar_swe_eval_agent"][0].tasks


def test_the_builder_ablation_trains_on_the_same_tokens_with_fewer_sequences() -> None:
    first = make_call(0, [1, 2], [3, 4])
    second = make_call(1, [1, 2, 3, 4, 5], [6])
    session = [first, second], BuilderSpec(name="prefix_merging")
    costs = {name: cost(name, [session], batch=1) for name in BUILDERS.names()}
    per_request, merged = costs["per_request"], costs["prefix_merging"]
    assert per_request.trainable == merged.trainable == 3
    assert (per_request.traces, per_request.tokens, per_request.padded, per_request.updates) == (2, 10, 10, 2)
    assert (merged.traces, merged.tokens, merged.padded, merged.updates) == (1, 6, 6, 1)
    assert cost("per_request", [session], batch=2).padded == 12, "the shorter one is padded to the longer one"


def test_the_builder_ablation_has_the_builder_settings_of_each_run(tmp_path: Path) -> None:
    """Guards against the costs of other traces than those that the run trains: here, one of a call under a grammar."""
    calls = [make_call(0, [1, 2], [3, 4]), make_call(1, [9], [6], sampling_mismatch=["a grammar"])]
    episode = make_episode("s", 1.0, calls)
    episode.request.builder = BuilderSpec(name="per_request", train_on_sampling_mismatch=True)
    journal = Journal(tmp_path / "calls.jsonl")
    for call in calls:
        journal.append(call)
    journal.close()
    episode.artifacts.journal = str(journal.path)
    (tmp_path / "episodes.jsonl").write_bytes(episode.to_json() + b"\n")
    sessions = recorded_sessions([tmp_path / "episodes.jsonl"])
    assert {cost(name, sessions, batch=1).trainable for name in BUILDERS.names()} == {3}
