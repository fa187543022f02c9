"""Tests with NeMo RL's real code on the CPU: `make nemo-rl NEMO_RL=DIRECTORY`, with a checkout of commit 7ea279a."""

import importlib.util
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12) and importlib.util.find_spec("nemo_rl") is not None:
    typing.TypedDict = typing_extensions.TypedDict  # NeMo RL is for Python 3.13; pydantic wants this one before 3.12


def prepare() -> None:
    """Do the above in a process of Ray, which calls this first."""
