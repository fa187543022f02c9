"""A plug-in's file in `conf/` shows the defaults of its `Options`; a file must not say another one by mistake."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from omegaconf import MISSING

from polar_gym.config.files import ROOMS
from polar_gym.paths import shipped_dir


def shipped_options() -> list[tuple[str, str, str, Any]]:
    """Return (group, plug-in, option, value) for every option that a shipped file names."""
    found = []
    for group, registry in ROOMS.items():
        for file in sorted((shipped_dir("conf") / group).glob("*.yaml")):
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
            name = values.pop("name")
            fields = registry.accepted(name).model_fields
            found += [(group, name, key, value) for key, value in values.items() if key in fields]
    return found


@pytest.mark.parametrize(("group", "name", "key", "value"), shipped_options())
def test_a_shipped_file_states_the_default_of_the_code(group: str, name: str, key: str, value: Any) -> None:
    """Guards against a default that is changed in one of its two places."""
    field = ROOMS[group].accepted(name).model_fields[key]
    default = field.get_default(call_default_factory=True)
    if value == MISSING:
        assert field.is_required() or not default
    else:
        assert value == default
