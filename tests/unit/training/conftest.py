"""A model for the check of the packing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tiny_gpt2() -> Iterator[Any]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads cost more than these sums
    sizes = {"n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    yield transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes, **off)).double()
    torch.set_num_threads(threads)
