"""The laws of the trainer hand-off: nothing trained twice, nothing lost in silence, advantages of sessions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from polar_gym.export.rows import to_row
from polar_gym.nemo.envelope import training_traces
from polar_gym.schema import EngineInfo, Episode, Sampling
from polar_gym.training import Batch, make_batch, padded
from polar_gym.training.advantage import advantages
from polar_gym.training.nemo_rl import datums, message_log, train_data
from polar_gym.training.trl import episode_reward, rollout_output
from tests.support.calls import make_call
from tests.support.episodes import forked, make_episode, sessions

SETTINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "overlong": st.sampled_from(["drop", "truncate", "mask"]),
        "zero_variance": st.sampled_from(["keep", "drop"]),
        "scale": st.sampled_from(["none", "std"]),
        "weighting": st.sampled_from(["token", "session"]),
        "multiple_of": st.integers(1, 5),
    }
)


def trained(batch: Batch) -> list[tuple[int, float]]:
    """Trained tokens with their logprobs."""
    return [
        (int(token), float(logprob))
        for row in batch.rows
        for token, mask, logprob in zip(row.token_ids, row.loss_mask, row.logprobs, strict=True)
        if mask
    ]


def trainable(episodes: list[Episode]) -> list[tuple[int, float]]:
    return [
        (int(token), float(logprob))
        for episode in episodes
        for trace in episode.trajectory.traces
        for token, mask, logprob in zip(trace.response_ids, trace.loss_mask, trace.logprobs, strict=True)
        if mask
    ]


@effort(max_examples=30)
@given(episodes=sessions())
def test_every_trainable_token_appears_exactly_once(episodes: list[Episode]) -> None:
    scored = [episode for episode in episodes if episode.reward is not None]
    tokens = trained(make_batch(episodes))
    assert Counter(tokens) == Counter(trainable(scored))
    assert all(times == 1 for times in Counter(tokens).values())


@effort(max_examples=30)
@given(episodes=sessions(), settings=SETTINGS)
def test_nothing_is_lost_in_silence(episodes: list[Episode], settings: dict[str, Any]) -> None:
    batch = make_batch(episodes, **settings)
    counts, rows = batch.counts, [row for row in batch.rows if not row.inert]
    assert counts.holds
    assert counts.trainable_tokens == len(trainable(episodes))
    assert counts.tokens == len(trained(batch))
    assert set(trained(batch)) <= set(trainable(episodes))
    assert counts.rows == len(rows)
    assert len(batch.rows) == counts.rows + counts.inert_rows
    assert len(batch.rows) % settings["multiple_of"] == 0
    assert counts.inert_rows < settings["multiple_of"]
    assert counts.masked_episodes == sum(episode.reward is None for episode in episodes)
    limit = settings["max_tokens"] or math.inf
    assert all(len(row.token_ids) <= limit for row in rows)
    assert not any(row.trainable_tokens for row in batch.rows if row.inert)


@effort(max_examples=30)
@given(episodes=sessions(), settings=SETTINGS)
def test_weights(episodes: list[Episode], settings: dict[str, Any]) -> None:
    """They sum to one, weigh tokens or sessions alike, and are nowhere else."""
    batch = make_batch(episodes, **settings)
    of_session: defaultdict[str, float] = defaultdict(float)
    for row in batch.rows:
        assert not row.weights[row.loss_mask == 0].any()
        assert not row.logprobs[row.loss_mask == 0].any()
        of_session[row.session_id] += float(row.weights.sum(dtype=np.float64))
    trained_sessions = {row.session_id for row in batch.rows if row.trainable_tokens}
    if not trained_sessions:
        assert not sum(of_session.values())
        return
    assert sum(of_session.values()) == pytest.approx(1, abs=1e-6)
    if settings["weighting"] == "session":
        assert all(of_session[name] == pytest.approx(1 / len(trained_sessions)) for name in trained_sessions)
    else:
        weights = np.concatenate([row.weights[row.loss_mask == 1] for row in batch.rows])
        assert weights == pytest.approx(1 / batch.counts.tokens)


@effort(max_examples=30)
@given(episodes=sessions(), settings=SETTINGS)
def test_advantages_are_of_sessions_and_sum_to_zero_in_each_group(
    episodes: list[Episode], settings: dict[str, Any]
) -> None:
    rewards = [episode.reward for episode in episodes]
    groups = [episode.session.task_id for episode in episodes]
    values = advantages(rewards, groups, scale=settings["scale"])
    for group in set(groups):
        scored = [value for value, name in zip(values, groups, strict=True) if name == group and not math.isnan(value)]
        assert sum(scored) == pytest.approx(0, abs=1e-9)
        if len(scored) > 1 and any(scored) and settings["scale"] == "std":
            assert np.std(scored, ddof=1) == pytest.approx(1, abs=1e-3)
    assert [math.isnan(value) for value in values] == [reward is None for reward in rewards]
    of_session = {episode.session.session_id: value for episode, value in zip(episodes, values, strict=True)}
    for row in make_batch(episodes, **settings).rows:
        assert row.inert or row.advantage == of_session[row.session_id]


def test_a_fork_changes_neither_the_baseline_nor_the_weight_of_its_session() -> None:
    """Guards against a mean over rows: three traces of one winner would raise the baseline from 0.5 to 0.75."""
    whole = make_episode("a", 1.0, [make_call(0, [1], list(range(9)))])
    torn = make_episode("a", 1.0, forked(3))
    loser = make_episode("b", 0.0, [make_call(0, [1], list(range(50, 59)))])
    for weighting in ("token", "session"):
        one = make_batch([whole, loser], weighting=weighting)
        three = make_batch([torn, loser], weighting=weighting)
        assert [row.advantage for row in one.rows] == [0.5, -0.5]
        assert [row.advantage for row in three.rows] == [0.5, 0.5, 0.5, -0.5]
        for batch in (one, three):
            assert sum(row.weights.sum() for row in batch.rows if row.session_id == "a") == pytest.approx(0.5)


def test_tokens_that_a_script_chose_are_not_trained_by_accident() -> None:
    """Guards against the tokens of a demo in a batch, where nothing tells them from those of a model."""
    scripted = EngineInfo(name="embedded", model="policy", scripted=True, max_model_len=100)
    episodes = [make_episode("a", 1.0, forked(1)), make_episode("b", 0.0, forked(1), engine=scripted)]
    with pytest.raises(ValueError, match=r"session b: a script chose its tokens.* with allow_scripted=True"):
        make_batch(episodes)
    with pytest.raises(ValueError, match="session b: a script chose its tokens"):
        rollout_output(episodes)
    assert make_batch(episodes, allow_scripted=True).counts.rows == 2
    masked = make_episode("b", None, forked(1), engine=scripted)
    assert make_batch([episodes[0], masked]).counts.rows == 1, "it trains nothing"


def test_a_masked_episode_is_in_no_mean() -> None:
    episodes = [
        make_episode("a", 1.0, forked(1)),
        make_episode("b", 0.0, forked(1)),
        make_episode("c", None, forked(2)),
    ]
    batch = make_batch(episodes)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5]
    assert batch.counts.traces_left_out == {"no_reward": 2}
    assert batch.counts.tokens_left_out == {"no_reward": 6}
    assert batch.counts.masked_episodes == 1


def test_equal_rewards_are_exactly_zero() -> None:
    """Guards against a rounding error blown up by a division by a standard deviation that is one too."""
    values = advantages([0.1, 0.1, 0.1], ["a"] * 3, scale="std")
    assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("overlong", "rows", "tokens", "traces_left_out"),
    [("drop", [3], 2, 1), ("truncate", [3, 4], 5, 0), ("mask", [3, 4], 2, 0)],
)
def test_overlong(overlong: Any, rows: list[int], tokens: int, traces_left_out: int) -> None:
    """A session's reward counts in its group whatever becomes of its rows."""
    short = make_episode("a", 1.0, [make_call(0, [1], [2, 3])])
    long = make_episode("b", 0.0, [make_call(0, [1], [4, 5, 6, 7, 8])])
    batch = make_batch([short, long], max_tokens=4, overlong=overlong)
    assert [len(row.token_ids) for row in batch.rows] == rows
    assert batch.rows[0].advantage == 0.5
    assert batch.counts.tokens == tokens
    assert batch.counts.traces_left_out["overlong"] == traces_left_out
    assert batch.counts.tokens_left_out["overlong"] == 7 - tokens


def test_groups_without_variance() -> None:
    flat = [make_episode(name, 1.0, forked(1), task_id="flat") for name in "ab"]
    steep = [make_episode(name, reward, forked(1), task_id="steep") for name, reward in (("c", 1.0), ("d", 0.0))]
    kept, dropped = make_batch([*flat, *steep]), make_batch([*flat, *steep], zero_variance="drop")
    assert [row.advantage for row in kept.rows] == [0.0, 0.0, 0.5, -0.5]
    assert [row.session_id for row in dropped.rows] == ["c", "d"]
    assert dropped.counts.traces_left_out == {"zero_variance": 2}
    assert (kept.counts.zero_variance_groups, dropped.counts.zero_variance_groups, dropped.counts.groups) == (
        1,
        1,
        2,
    )


@pytest.mark.parametrize(
    ("episodes", "settings", "says"),
    [
        ([make_episode("a", 1.0), make_episode("a", 0.0)], {}, "session a occurs 2 times"),
        ([make_episode("a", float("nan"))], {}, "session a: reward=nan is not a finite number"),
        ([], {"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ([], {"multiple_of": 0}, "multiple_of=0: expected at least 1"),
        ([], {"overlong": "dorp"}, "overlong='dorp': unknown; known: 'drop', 'truncate', 'mask'"),
        ([], {"zero_variance": "dorp"}, "zero_variance='dorp': unknown; known: 'keep', 'drop'"),
        ([], {"scale": "nine"}, "scale='nine': unknown; known: 'none', 'std'"),
        ([], {"weighting": "trace"}, "weighting='trace': unknown; known: 'token', 'session'"),
    ],
)
def test_wrong_input(episodes: list[Episode], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_batch(episodes, **settings)


def test_a_logprob_that_is_no_number_is_refused() -> None:
    """Guards against a loss that is NaN, and so a policy that is."""
    episode = make_episode("a", 1.0, [make_call(0, [1], [2, 3])])
    episode.trajectory.traces[0].logprobs[1] = float("nan")
    for hand_off in (make_batch, rollout_output):
        with pytest.raises(
            ValueError, match=r"session a, trace .*: the engine gave a logprob that is not a finite number"
        ):
            hand_off([episode])
    episode.reward = None
    assert make_batch([episode]).rows == [], "a masked one has no row"


@effort(max_examples=30)
@given(episodes=sessions(), settings=SETTINGS, multiple=st.integers(1, 8))
def test_padded_rows_come_back(episodes: list[Episode], settings: dict[str, Any], multiple: int) -> None:
    rows = make_batch(episodes, **settings).rows
    if not rows:
        with pytest.raises(ValueError, match="there is no row"):
            padded(rows, pad_id=7)
        return
    arrays = padded(rows, pad_id=7, length_multiple_of=multiple)
    assert arrays["input_ids"].shape[1] % multiple == 0
    assert arrays["attention_mask"].sum(axis=1).tolist() == arrays["lengths"].tolist()
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        if not row.inert:
            assert arrays["input_ids"][index, :length].tolist() == row.token_ids.tolist()
        assert (arrays["input_ids"][index, length:] == 7).all()
        for name, value in (("loss_mask", row.loss_mask), ("old_logprobs", row.logprobs), ("weights", row.weights)):
            assert arrays[name][index, :length].tolist() == value.tolist()
            assert not arrays[name][index, length:].any()
        assert arrays["advantages"][index] == pytest.approx(np.float32(row.advantage) * arrays["loss_mask"][index])
        assert (arrays["group_ids"][index] == -1) == row.inert
    by_number = {(number, row.group_id) for number, row in zip(arrays["group_ids"], rows, strict=True)}
    assert len(by_number) == len({row.group_id for row in rows})


@effort(max_examples=30)
@given(episodes=sessions(), settings=SETTINGS)
def test_nemo_rls_reading_of_message_logs_gives_the_rows_back(
    episodes: list[Episode], settings: dict[str, Any]
) -> None:
    """Its rules: an assistant's message with `generation_logprobs` is trained, all is concatenated in order."""
    rows = make_batch(episodes, **settings).rows
    advantages = train_data(rows, pad_id=0)["advantages"] if rows else []
    for row, datum, trained in zip(rows, datums(rows), advantages, strict=True):
        log = datum["message_log"]
        assert np.concatenate([message["token_ids"] for message in log]).tolist() == row.token_ids.tolist()
        mask, logprobs = [], []
        for message in log:
            learn = message["role"] == "assistant" and "generation_logprobs" in message
            mask += [int(learn)] * len(message["token_ids"])
            logprobs += message["generation_logprobs"].tolist() if learn else [0.0] * len(message["token_ids"])
        assert mask == row.loss_mask.tolist()
        assert logprobs == row.logprobs.tolist()
        assert datum["length"] == len(log[0]["token_ids"]) == row.prompt_length, "NeMo RL groups by whole messages"
        assert datum["loss_multiplier"] == float(any(mask))
        own = trained[: len(mask)][row.loss_mask == 1]
        assert own == pytest.approx(np.full(len(own), datum["advantage"]), rel=1e-5), (
            "weights of sessions count here too"
        )


def test_nemo_rls_train_data() -> None:
    rows = make_batch([make_episode("a", 1.0, forked(2)), make_episode("b", 0.0, forked(1))], multiple_of=4).rows
    data = train_data(rows, pad_id=0, make_sequence_length_divisible_by=8)
    assert data["input_ids"].shape == data["token_mask"].shape == data["advantages"].shape == (4, 8)
    assert data["input_lengths"].tolist() == [4, 4, 4, 1]
    assert data["sample_mask"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert data["advantages"][0].tolist() == [0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert [message["role"] for message in message_log(rows[0])] == ["user", "assistant"]


def test_nemo_rls_advantages_hold_the_weights() -> None:
    """NeMo RL's mean is over tokens: a session of six trained tokens weighs as much as one of three."""
    episodes = [make_episode("a", 1.0, forked(2)), make_episode("b", 0.0, forked(1))]
    data = train_data(make_batch(episodes, weighting="session").rows, pad_id=0)
    assert data["advantages"][:, 1].tolist() == pytest.approx([0.375, 0.375, -0.75])


@effort(max_examples=30)
@given(episodes=sessions())
def test_trl_gets_one_row_for_each_episode(episodes: list[Episode]) -> None:
    output, counts = rollout_output(episodes)
    assert counts.holds
    assert {len(values) for values in output.values()} == {len(episodes)}
    assert episode_reward(prompts=[], completions=[], **{"reward": output["reward"]}) == output["reward"]
    entries = zip(*(output[name] for name in ("completion_ids", "logprobs", "env_mask", "reward")), strict=True)
    tokens = 0
    for completion, logprobs, mask, reward in entries:
        assert len(completion) == len(logprobs) == len(mask) > 0
        assert reward is not None or not any(mask)
        tokens += sum(mask)
    assert tokens == counts.tokens


def test_every_form_of_a_row_says_how_its_tokens_were_sampled() -> None:
    """Under truncation the engine's logprobs are renormalised over the kept tokens: a trainer must be able to tell."""
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20)
    sent = {**sampling.model_dump(exclude_none=True), "max_tokens": 9}
    calls = [make_call(0, [1], [2], sampling=sent), make_call(1, [1, 2, 3], [4], sampling=sent)]
    engine = EngineInfo(name="vllm", model="m", max_model_len=9, logprobs_mode="processed")
    episode = make_episode("a", 1.0, calls, engine=engine)
    said = {**sampling.model_dump(exclude={"seed"}), "logprobs_mode": "processed"}
    batch = make_batch([episode], multiple_of=2)
    (envelope,) = training_traces(episode, {call.call_id: call for call in calls})["traces"]
    forms = [batch.rows[0].sampling, envelope["sampling"], rollout_output([episode])[0]["sampling"][0]]
    forms += [
        datums(batch.rows)[0]["extra_env_info"]["sampling"],
        to_row(episode, episode.trajectory.traces[0])["sampling"],
    ]
    assert forms == [said] * 5
    arrays = padded(batch.rows, pad_id=0)
    for name, sampled, neutral in (("temperature", 0.7, 1.0), ("top_p", 0.9, 1.0), ("top_k", 20, -1)):
        first, inert = arrays[name].tolist()
        assert first == [neutral, np.float32(sampled), neutral, np.float32(sampled)]
        assert inert == [neutral] * 4


def test_trl_gets_the_trace_with_most_to_train() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [5], [6, 7]), make_call(2, [5, 6, 7, 8], [9])]
    output, counts = rollout_output([make_episode("a", 0.5, calls), make_episode("b", None)])
    assert output["prompt_ids"] == [[5], [0]]
    assert output["completion_ids"] == [[6, 7, 8, 9], [0]]
    assert output["env_mask"] == [[1, 1, 0, 1], [0]]
    assert output["reward"] == [0.5, None]
    assert counts.tokens_left_out == {"other_trace": 1}
