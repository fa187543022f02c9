"""The parts of attacks, one module for each family, with the tuple `FRAGMENTS`."""

from __future__ import annotations

import importlib
import pkgutil

from tests.attack_search.fragment import Fragment

FAMILIES: dict[str, tuple[Fragment, ...]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").FRAGMENTS
    for module in pkgutil.iter_modules(__path__)
}
FRAGMENTS: dict[str, Fragment] = {each.name: each for found in FAMILIES.values() for each in found}
"""All fragments by name."""

if len(FRAGMENTS) != sum(map(len, FAMILIES.values())):
    raise ValueError("tests/attack_search/fragments: two fragments have the same name; rename one")
