"""What errors tell people to install."""

from __future__ import annotations

from importlib import metadata

import pytest

from polar_gym.errors import how_to_install


def test_the_packages_of_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `pip install 'polar-gym[export]'`: no index has the package."""
    lines = ["aiohttp>=3", "pyarrow>=19; extra == 'export'", 'torch; extra == "torch"', "ray; extra == 'ray'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert how_to_install("torch", "export") == "pip install 'pyarrow>=19' torch"


def test_a_source_tree_is_installed_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert how_to_install("export", "swe") == "pip install '.[export,swe]', in the checkout"
