"""The ids of a prompt are read from an answer's bytes, and nothing else of it changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.engines.vllm.prompt_echo import Sent, loads

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=5) | st.just('"prompt_token_ids":[1]') | IDS,
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "prompt_token_ids", "b]"]), inner, max_size=3) | st.lists(inner)
    ),
    max_leaves=8,
)


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    ids = answer.get("prompt_token_ids")
    return {**answer, "prompt_token_ids": ids.tolist()} if isinstance(ids, np.ndarray) else answer


@given(answer=st.dictionaries(st.sampled_from(["a", "prompt_token_ids", "z"]), VALUES, max_size=3), sent=IDS)
def test_it_reads_what_json_says(answer: dict[str, Any], sent: list[int]) -> None:
    for raw in (orjson.dumps(answer), json.dumps(answer).encode()):
        assert plain(loads(raw)) == answer
        assert plain(loads(raw, Sent(np.asarray(sent, np.int32)))) == answer


def test_ids_that_were_sent_are_not_read_again() -> None:
    sent = np.arange(5, dtype=np.int32)
    raw = orjson.dumps({"choices": [], "prompt_token_ids": sent.tolist()})
    assert loads(raw, Sent(sent))["prompt_token_ids"] is sent
    read = loads(raw, Sent(sent[:4]))["prompt_token_ids"]
    assert read is not sent
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, sent)


@pytest.mark.parametrize("listed", ["null", "[]", "[1, 2]", "[1.5]", "[-1]", "[3000000000]", '["a"]'])
def test_what_is_no_plain_list_is_left_to_the_json_parser(listed: str) -> None:
    raw = f'{{"prompt_token_ids":{listed}}}'.encode()
    assert plain(loads(raw)) == json.loads(raw)


def test_a_field_of_that_name_further_down_is_not_the_prompts() -> None:
    answer = {"a": {"prompt_token_ids": [1, 2]}, "prompt_token_ids": []}
    assert loads(orjson.dumps(answer)) == answer


@pytest.mark.parametrize("listed", ["[1,,2]", "[,1]", "[1,]", "[1", "[1}"])
def test_what_is_no_json_is_an_error(listed: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(f'{{"prompt_token_ids":{listed}}}'.encode())
