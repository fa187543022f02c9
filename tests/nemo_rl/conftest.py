"""Skips these tests where NeMo RL is not; `tests/unit/nemo/` holds our answers against its recorded ones everywhere."""

import importlib
import importlib.util
from typing import Any

import pytest


@pytest.fixture(scope="session")
def trainer() -> Any:
    """Return `tests.nemo_rl.trainer`."""
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("NeMo RL is not here; `make nemo-rl NEMO_RL=DIRECTORY` runs this with a checkout of it")
    return importlib.import_module("tests.nemo_rl.trainer")
