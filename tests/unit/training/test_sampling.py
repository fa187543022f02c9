"""Logprobs that are not those of the sampling reach no trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from polar_gym.schema import EngineInfo, Episode, ModelCall
from polar_gym.training import make_batch, padded
from polar_gym.training.arrow import to_table
from polar_gym.training.nemo_rl import datums, train_data
from polar_gym.training.prime_rl import training_samples
from polar_gym.training.trl import rollout_output, rollout_samples
from polar_gym.training.verl import agent_loop_outputs
from tests.support.calls import make_call
from tests.support.episodes import make_episode

ROW_FORMS: dict[str, Callable[[Any], Any]] = {
    "padded": lambda rows: padded(rows, 0),
    "arrow": to_table,
    "prime_rl": lambda rows: training_samples(rows, "swe"),
    "trl": lambda rows: rollout_samples(rows, 0),
    "nemo_rl, messages": datums,
    "nemo_rl, arrays": lambda rows: train_data(rows, 0),
    "verl": lambda rows: agent_loop_outputs(rows, (0, 0)),
}
FORMS: dict[str, Callable[[list[Episode]], Any]] = {
    **{name: lambda episodes, form=form: form(make_batch(episodes).rows) for name, form in ROW_FORMS.items()},
    "trl, one row": rollout_output,
}


def episode(mode: Any, calls: Sequence[ModelCall], reward: float | None = 1.0) -> Episode:
    return make_episode(
        "a", reward, calls, engine=EngineInfo(name="vllm", model="m", max_model_len=9, logprobs_mode=mode)
    )


def sampled(setting: str, **fields: Any) -> list[ModelCall]:
    """Return the calls of a trace, of which the first one is sampled with a setting."""
    name, value = setting.split("=")
    return [make_call(0, [1], [2, 3], sampling={name: float(value)}, **fields), make_call(1, [1, 2, 3, 4], [5])]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_raw_logprobs_of_a_shaped_distribution_are_refused(form: Callable[..., Any]) -> None:
    """Guards against a ratio over another distribution than the one that was sampled from, in any call of a trace."""
    shaped = [
        ("temperature=0.5", "temperature=1.0"),
        ("top_p=0.9", "top_p=1.0"),
        ("top_k=20.0", "top_k=-1"),
        ("min_p=0.1", "min_p=0.0"),
        ("presence_penalty=0.5", "presence_penalty=0.0"),
        ("frequency_penalty=0.5", "frequency_penalty=0.0"),
        ("repetition_penalty=1.2", "repetition_penalty=1.0"),
    ]
    for setting, neutral in shaped:
        with pytest.raises(
            ValueError, match=f"session a: logprobs_mode='raw', .* taken before {setting}, .* {neutral}$"
        ):
            form([episode("raw", sampled(setting))])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logprobs_of_the_sampling_and_of_an_unknown_mode_are_taken(form: Callable[..., Any]) -> None:
    form([episode("raw", sampled("top_k=0"))])
    form([episode("processed", sampled("temperature=0.5"))])
    form([episode(None, sampled("temperature=0.5"))])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_that_were_not_sampled_are_refused(form: Callable[..., Any]) -> None:
    """Guards against a greedy session whose captured logprobs of 0 make the old probability of each token 1."""
    for mode in ("processed", "raw", None):
        with pytest.raises(
            ValueError, match=r"session a: sampled with temperature=0\.0, by which no trainer can divide"
        ):
            form([episode(mode, sampled("temperature=0.0"))])


def test_what_is_not_trained_may_be_sampled_in_any_way() -> None:
    rows = make_batch([episode("raw", sampled("temperature=0.5", sampling_mismatch=["a forced tool"]))]).rows
    assert padded(rows, 0)["loss_mask"].tolist() == [[0, 0, 0, 0, 1]]
    output, _ = rollout_output([episode("raw", sampled("temperature=0.5"), reward=None)])
    assert output["env_mask"] == [[0, 0, 0, 0]]


@pytest.mark.parametrize("mode", ["processed", None])
@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=20.0", "min_p=0.1", "repetition_penalty=1.2"])
def test_prime_rl_gets_no_sampling_that_its_trainer_cannot_repeat(mode: Any, setting: str) -> None:
    """prime-rl divides logits by a temperature; it has no other field of the sampling."""
    rows = make_batch([episode(mode, sampled(setting))]).rows
    says = f"session a: sampled with {setting}: prime-rl's trainer repeats a temperature only"
    with pytest.raises(ValueError, match=re.escape(says)):
        training_samples(rows, "swe")
