"""Whatever a harness makes of the policy's words on their way back, its session is one trace of what was sampled."""

from __future__ import annotations

import pytest

from tests.e2e.hard_answers import ANSWERS, FINAL
from tests.show.result import HARNESSES
from tests.show.rewrites import run
from tests.support.requirements import need_bubblewrap, need_node

ANEW = "arguments written anew"

REWRITES = {
    "codex": set(),
    "claude_code": {"text dropped", ANEW, f"{ANEW}, keys reordered", "arguments changed: command='ls'"},
    "gemini_cli": {ANEW},
    "qwen_code": {"thinking trimmed", "thinking dropped", ANEW},
    "opencode": {ANEW},
    "mini_swe_agent": set(),
    "mistral_vibe": set(),
    "pi": {"text dropped", "thinking dropped", ANEW},
}


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_session_is_one_trace(harness: str) -> None:
    """Guards against links that depend on the words which harnesses trim, drop, reorder and write anew."""
    need_node()
    need_bubblewrap()
    shown = await run(harness, "lean")
    assert shown.episode.session.failure is None
    assert FINAL in shown.episode.artifacts.stdout
    assert set(shown.rewritten) == set(ANSWERS), "all of them came back"
    assert {change for changes in shown.rewritten.values() for change in changes} == REWRITES[harness]
    fidelity = shown.episode.trajectory.fidelity
    assert fidelity.traces_by_kind == {"main": 1}
    assert (fidelity.spliced, fidelity.canonical, fidelity.breaks) == (len(ANSWERS), 0, [])
    assert fidelity.trainable_tokens == fidelity.sampled_tokens
    changed = [each for each, changes in shown.rewritten.items() if any("changed" in change for change in changes)]
    assert fidelity.edited_answers == len(changed), "nothing else is another meaning"
