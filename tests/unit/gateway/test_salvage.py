"""A node's next process ends the sessions that the last process left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.admission import Allowed
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.salvage import salvage
from polar_gym.gateway.node.service import NodeService
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.gateway.node.state import Key, Manifest, StateDirectory
from polar_gym.runtimes import scratch_directory
from polar_gym.schema import RuntimeSpec
from tests.support.episodes import make_episode


def a_session(directory: Path, key: Key, runtime: dict[str, Any]) -> StateDirectory:
    """Return a state directory with one session, whose process died."""
    state, left = StateDirectory(directory), make_episode(key.session_id, 1.0)
    request = left.request.model_copy(update={"runtime": RuntimeSpec.model_validate(runtime)})
    state.begin(key, Manifest(session=left.session, request=request, engine=left.engine))
    return state


@pytest.mark.parametrize("runtime", [{"name": "bubblewrap", "wings": 2}, {"name": "no_such_package:RUNTIME"}])
async def test_a_session_is_salvaged_whose_runtime_cannot_be_made(
    tmp_path: Path, runtime: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a node that exits at every start once a plug-in or one of its options is gone."""
    key = Key("s", 0)
    state = a_session(tmp_path, key, runtime)
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache")
    await salvage(state, node.runtime)
    assert state.files(key).ending() == "interrupted"
    assert "session s.0: its sandbox may be left: " in caplog.text


async def test_what_is_left_of_a_session_that_never_began_is_removed(tmp_path: Path) -> None:
    """Guards against records of other nodes, sent with an order, that stay for ever where the node dies then."""
    began, other = Key("s", 0), Key("s", 1)
    state = a_session(tmp_path, began, {"name": "bubblewrap"})
    (state.files(other).record / "journal").mkdir(parents=True)
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache")
    await salvage(state, node.runtime)
    assert (state.files(began).directory.exists(), state.files(other).directory.exists()) == (True, False)


async def test_a_sandbox_that_could_not_be_removed_is_removed_at_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a sandbox that stayed for ever: its session had an episode by then, and was not reaped again."""
    key, scratch = Key("s", 0), tmp_path / "scratch"
    scratch.mkdir()
    state = a_session(tmp_path, key, {"name": "comes_back:RUNTIME", "scratch": str(scratch)})
    own, later = (scratch_directory.make(f"s.{attempt}", scratch) for attempt in (0, 1))
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache")
    await salvage(state, node.runtime)
    assert (state.files(key).ending(), own.exists()) == ("interrupted", True)
    (tmp_path / "comes_back.py").write_text("from polar_gym.runtimes.bubblewrap import RUNTIME\n")
    monkeypatch.syspath_prepend(tmp_path)
    await salvage(state, node.runtime)
    assert (own.exists(), later.exists()) == (False, True)


async def test_a_session_of_another_version_does_not_stop_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a node that ends at every start after an upgrade, with no other session salvaged or delivered."""
    running, ended, own, without, unreaped = (Key(name, 0) for name in "abcde")
    for key in (running, ended, own, without, unreaped):
        state = a_session(tmp_path, key, {"name": "bubblewrap"})
    for key in (ended, without, unreaped):
        state.finish(key, make_episode(key.session_id, 1.0))
    for path, part in (
        (state.files(running).manifest, "request"),
        (state.files(ended).episode, "session"),
        (state.files(unreaped).manifest, "request"),
    ):
        written = json.loads(path.read_text())
        written[part]["field_of_another_version"] = 1
        path.write_text(json.dumps(written))
    state.files(without).episode.write_text("{}")
    state.files(unreaped).sandboxes_left.touch()
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path / "cache")
    await salvage(state, node.runtime)
    service = NodeService(node, state, GatewaySettings(), "key", Allowed())
    await service.find()
    assert sorted(session.session_id for session in service.sessions) == ["c", "e"]
    assert sorted(path.name.partition(".")[0] for path in (tmp_path / "unreadable").iterdir()) == ["a", "b", "d"]
    assert "session e.0: its sandbox may be left" in caplog.text
    assert "session a.0 cannot be read, and is kept in" in caplog.text
