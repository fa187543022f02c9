"""The model of the tests of the embedded engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and its tokenizer."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return directory
