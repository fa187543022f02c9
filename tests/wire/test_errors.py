"""Real harnesses where the engine fails, through the real gateway: cases of `make show-errors` that were worse once."""

from __future__ import annotations

import pytest

from polar_gym.gateway.proxy import receiving
from tests.show.errors import markdown, parse_options, run
from tests.support.requirements import need_bubblewrap
from tests.wire.faulty_engine import FAULTS


@pytest.mark.parametrize(
    ("harness", "case"),
    [("codex", "429"), ("pi", "503 after headers"), ("qwen_code", "reset after headers")],
)
async def test_it_asks_again(harness: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sessions that end because the engine was busy: Codex takes a 429 that names no time for final, Pi
    and Qwen Code an error event in a stream."""
    need_bubblewrap()
    monkeypatch.setattr(receiving, "RETRY_AFTER_SECONDS", 1)
    row = await run(harness, case, parse_options(["--times", "1"]))
    assert row["reaction"].startswith("asked again after ")
    assert (row["requests"], row["end"], row["exit"], row["judged as"]) == ("7", "finished the task", "0", "reward 1")
    assert f"| {case} | {harness} | 7 |" in markdown([row])


async def test_a_session_that_ends_while_the_engine_is_down_has_no_reward() -> None:
    """Guards against a reward of 0 for what the engine did: the time ran out while the harness asked again."""
    need_bubblewrap()
    row = await run("claude_code", "503", parse_options(["--times", "0", "--limit", "30"]))
    assert row["reaction"].startswith("asked again after ")
    assert (row["end"], row["exit"]) == ("cut off after 30 s", "-")
    assert row["judged as"] == "engine_error (no reward)"


def test_every_case_can_be_asked_for() -> None:
    arguments = [word for case in FAULTS for word in ("--case", case)]
    assert parse_options(arguments).case == list(FAULTS)
