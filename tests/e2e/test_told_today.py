"""The real harnesses are told the date of their group, and what they start sees the machine's clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polar_gym.gateway.proxy.journal import read_journal
from tests.e2e.play import make, play, scripted
from tests.support.requirements import need_bubblewrap, need_node

COMMAND = "date -u +clock:%F; node -p '\"node:\" + new Date().getUTCFullYear()'; echo inherited:$BUN_OPTIONS:"


@pytest.mark.parametrize(
    ("harness", "says"),
    [
        ("pi", "Current date: 2024-02-29"),
        ("claude_code", "Today's date is 2024-02-29."),
        ("gemini_cli", "Today's date is Thursday, February 29, 2024"),
        ("qwen_code", "Today's date is Thursday, February 29, 2024"),
    ],
)
def test_a_harness_is_told_the_date_of_its_group(harness: str, says: str, tmp_path: Path) -> None:
    """Guards against a group that crosses midnight and falls into two."""
    need_node()
    need_bubblewrap()
    settings = {"name": harness, "profile": "lean", "today": "2024-02-29"}
    env = make(tmp_path, harness=settings, runtime="bubblewrap", engine=scripted([COMMAND]))
    before = time.gmtime()
    try:
        _, _, _, episode = play(env)
    finally:
        env.close()
    first, *_, last = read_journal(Path(str(episode.artifacts.journal)))
    assert says in str([message["content"] for message in first.messages])
    seen = str([message["content"] for message in last.messages if message["role"] == "tool"])
    days = {time.strftime("clock:%F", moment) for moment in (before, time.gmtime())}
    assert any(day in seen for day in days), seen
    assert any(f"node:{day[6:10]}" in seen for day in days), seen
    assert "inherited::" in seen, seen
