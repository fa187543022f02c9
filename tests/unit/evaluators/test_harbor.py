"""The rewards that a verifier of Harbor wrote: finite numbers, or an error in one line."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.evaluators.harbor import parse_rewards


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_is_the_reward_in_either_file(number: float) -> None:
    assert parse_rewards("reward.txt", f" {number!r}\n".encode()) == {"reward": number}
    assert parse_rewards("reward.json", json.dumps({"reward": number, "x": 1}).encode()) == {"reward": number, "x": 1}


@pytest.mark.parametrize("text", ["", "good", "nan", "inf", "-inf", "1e400", "1 2", "[1]", "{}", "\x00", "\udcff"])
def test_nonsense_in_the_text_file(text: str) -> None:
    with pytest.raises(ValueError, match=r"reward\.txt holds no finite number: "):
        parse_rewards("reward.txt", text.encode(errors="surrogateescape"))


@pytest.mark.parametrize(
    "text",
    ["", "1", "[1]", "{}", "null", '{"reward": "1"}', '{"reward": null}', '{"reward": NaN}', '{"reward": 1e400}',
     '{"reward": 1' + "0" * 400 + "}", '{"reward": [1]}', '{"reward": 1, "x": Infinity}', "[" * 100_000],
)  # fmt: skip
def test_nonsense_in_the_json_file(text: str) -> None:
    with pytest.raises(ValueError, match=r"reward\.json holds no finite number: ") as caught:
        parse_rewards("reward.json", text.encode())
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=40))
def test_any_bytes_are_a_reward_or_an_error(content: bytes) -> None:
    for path in ("reward.txt", "reward.json"):
        try:
            rewards = parse_rewards(path, content)
        except ValueError:
            continue
        assert all(map(math.isfinite, rewards.values()))
