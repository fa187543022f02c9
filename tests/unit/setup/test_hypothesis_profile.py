"""How much property tests try, and which inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import tests.conftest
from hypothesis import settings

own = settings(max_examples=7)
print(own.derandomize, own.database is None, own.max_examples)
"""


@pytest.mark.parametrize(("ci", "said"), [("true", "True True 7"), ("", "False False 7")])
def test_in_ci_every_run_tries_the_same_inputs_as_many_as_each_test_says(ci: str, said: str) -> None:
    """A landing must not hang on luck."""
    checkout = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=checkout,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == said
