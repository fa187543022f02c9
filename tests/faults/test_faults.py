"""Every kind of process killed once while a few sessions run; `make show-faults` does it with hundreds."""

from __future__ import annotations

from pathlib import Path

from tests.faults.run import Faults, run
from tests.support.requirements import need_bubblewrap


async def test_nothing_is_lost_when_each_process_is_killed_once(tmp_path: Path) -> None:
    need_bubblewrap()
    faults = Faults(
        sessions=12,
        open_sessions=10,
        pools={"init": 1, "ready": 2, "run": 3, "postrun": 1},
        rounds=1,
        engine_kills=1,
        engine_away_seconds=2.0,
        receiver_away_seconds=1.0,
        gateway_away_seconds=(0.0,),
        pause_seconds=(0.0, 0.3),
        delay_seconds=0.1,
        limit_seconds=1000,
    )
    outcome = await run(faults, tmp_path)
    assert {law: breaches for law, breaches in outcome.breaches.items() if breaches} == {}
    assert outcome.answers["in an episode"] > 12
