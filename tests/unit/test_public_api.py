"""The names that users import from `polar_gym` itself."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import polar_gym
from polar_gym.client import RolloutClient, SyncRolloutClient
from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.schema import Episode, TaskRequest, Trace
from polar_gym.training import make_batch, padded

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "python.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_public_names_are_these() -> None:
    expected = {
        "ConfigError": ConfigError,
        "Episode": Episode,
        "RolloutClient": RolloutClient,
        "SyncRolloutClient": SyncRolloutClient,
        "TaskRequest": TaskRequest,
        "Trace": Trace,
        "__version__": PROJECT["version"],
        "load_config": load_config,
        "make_batch": make_batch,
        "padded": padded,
    }
    assert {name: getattr(polar_gym, name) for name in polar_gym.__all__} == expected


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'polar_gym' has no attribute 'Episodes'"):
        _ = polar_gym.Episodes


@pytest.mark.parametrize("name", polar_gym.__all__)
def test_the_page_names_each_of_them(name: str) -> None:
    section = PAGE.partition("## The public names\n")[2].partition("\n##")[0]
    assert f"`{name}`" in section
