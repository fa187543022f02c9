"""A model for the check of the packing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import tiny_model


@pytest.fixture(scope="module")
def tiny_gpt2() -> Iterator[Any]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    torch: Any = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads cost more than these sums
    yield tiny_model.tiny_gpt2()
    torch.set_num_threads(threads)
