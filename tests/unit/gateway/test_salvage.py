"""A node's next process ends the sessions that the last process left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.salvage import salvage
from polar_gym.gateway.node.state import Key, Manifest, StateDirectory
from polar_gym.schema import RuntimeSpec
from tests.support.episodes import make_episode


@pytest.mark.parametrize("runtime", [{"name": "bubblewrap", "wings": 2}, {"name": "no_such_package:RUNTIME"}])
async def test_a_session_is_salvaged_whose_runtime_cannot_be_made(
    tmp_path: Path, runtime: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a node that exits at every start once a plug-in or one of its options is gone."""
    state, key, left = StateDirectory(tmp_path), Key("s", 0), make_episode("s", 1.0)
    request = left.request.model_copy(update={"runtime": RuntimeSpec.model_validate(runtime)})
    state.begin(key, Manifest(session=left.session, request=request, engine=left.engine))
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache")
    await salvage(state, node.runtime)
    assert state.files(key).ending() == "interrupted"
    assert "session s.0: its sandbox may be left: " in caplog.text
