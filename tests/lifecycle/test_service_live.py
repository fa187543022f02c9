"""What the live page is told: one state for all pages, then its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.protocol import Live, Transcript
from polar_gym.service import live
from polar_gym.service.live import Watch, merge_patch
from polar_gym.service.node_link import NodeLink
from tests.lifecycle.peer_node import PeerNode, make_request
from tests.lifecycle.service_fixtures import NODE_KEY, rollout_server

values = st.recursive(
    st.integers(0, 3) | st.text(max_size=1) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
documents = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


def patched(value: Any, patch: Any) -> Any:
    """Return the value that a JSON merge patch makes: the pseudocode of RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    value = dict(value) if isinstance(value, dict) else {}
    for name, change in patch.items():
        if change is None:
            value.pop(name, None)
        else:
            value[name] = patched(value.get(name), change)
    return value


@given(documents, documents)
def test_a_patch_leads_from_one_state_to_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert patched(old, merge_patch(old, new)) == new
    assert merge_patch(old, old) == {}


async def test_pages_share_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that asks all nodes again for each page that is open, and that sends all again."""
    async with (
        rollout_server(tmp_path) as (service, client),
        PeerNode(client.url, NODE_KEY) as node,
        NodeLink(NODE_KEY) as link,
    ):
        await client.submit(make_request("a", num_samples=2))
        one, two = await node.take(2)
        node.transcripts = [Transcript(session_id=one.session_id, attempt=0, calls=1, lines=[("user", "hello")])]
        await node.beat()
        watch = Watch(service, link, [])
        early, late = watch.lines(), watch.lines()
        monkeypatch.setattr(live, "SECONDS", 3600.0)
        line = await anext(early)
        assert await anext(late) == line
        sessions = Live.from_json(line).sessions
        assert {each.session.session_id: each.lines for each in sessions.values()} == {
            one.session_id: [("user", "hello")],
            two.session_id: [],
        }
        watch = Watch(service, link, [])
        monkeypatch.setattr(live, "SECONDS", 0.0)
        early, late = watch.lines(), watch.lines()
        state, seen = orjson.loads(await anext(early)), orjson.loads(await anext(late))
        for words in ("one", "two"):
            node.transcripts[0].lines = [("user", words)]
            patch = orjson.loads(await anext(early))
            assert patch["sessions"] == {f"{one.session_id}.0": {"lines": [["user", words]]}}
            state = patched(state, patch)
        await node.finish(one)
        state = patched(state, orjson.loads(await anext(early)))
        assert list(state["sessions"]) == [f"{two.session_id}.0"]
        seen = patched(seen, orjson.loads(await anext(late)))
        new = orjson.loads(await anext(watch.lines()))
        for each in (state, seen):
            assert each["sessions"] == new["sessions"]
