"""The clock of a program on node that is told a date: which date, in which time zone, and what else of `Date` moves."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from polar_gym.harnesses import Harness, Launch
from polar_gym.harnesses.today import told_today
from tests.support.harness_context import context
from tests.support.requirements import need_node

DAY = date(2026, 3, 10)
NOON = timedelta(hours=12)
ON_NODE = Harness(launch=lambda context: Launch(argv=["node"]), told_today_by="node")

PRINTS = """
class Moment extends Date {}
console.log(JSON.stringify({
  shift: Date.now() - performance.timeOrigin - performance.now(),
  again: new Date().getTime() - Date.now(),
  written: new Date(Date()).getTime() - Date.now(),
  given: [new Date(0).getTime(), new Date(2026, 0, 2).getDate(), Date.UTC(1970, 0), Date.parse("1970-01-01")],
  kinds: [new Date() instanceof Date, new Date().constructor === Date, new Moment() instanceof Moment],
  inherited: require("child_process").execFileSync(process.execPath, ["-p", "Date.now()"]) - Date.now(),
}));
"""


def said_by_node(tmp_path: Path, launched: datetime, zone: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a program says that is launched then, and told `DAY`; durations in ms."""
    need_node()
    monkeypatch.setattr("polar_gym.harnesses.today.time.time", lambda: launched.timestamp())
    launch = told_today(ON_NODE, Launch(argv=["node", "-e", PRINTS]), context(today=DAY))
    argv = list(launch.argv)
    for name, text in launch.files.items():
        file = tmp_path / Path(name).name
        file.write_text(text)
        argv = [str(file) if part == name else part for part in argv]
    done = subprocess.run(argv, env={**os.environ, "TZ": zone}, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland", "America/Los_Angeles"])
@pytest.mark.parametrize("hours", [-60, 0.5, 23.5, 24.1, 300])
def test_outside_of_its_day_a_program_starts_at_the_days_noon(
    zone: str, hours: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    midnight = datetime(DAY.year, DAY.month, DAY.day, tzinfo=ZoneInfo(zone))
    said = said_by_node(tmp_path, midnight + timedelta(hours=hours), zone, monkeypatch)
    expected = NOON - timedelta(hours=hours)
    assert said["shift"] == pytest.approx(expected / timedelta(milliseconds=1), abs=3_700_000), (
        "or an hour more or less"
    )
    assert said["shift"] != 0


@pytest.mark.parametrize("hours", [1.1, 12, 22.9])
def test_on_its_day_a_program_has_the_machines_clock(
    hours: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = datetime(DAY.year, DAY.month, DAY.day, tzinfo=ZoneInfo("UTC")) + timedelta(hours=hours)
    assert abs(said_by_node(tmp_path, launched, "UTC", monkeypatch)["shift"]) < 10_000


def test_nothing_else_of_date_changes_and_nobody_inherits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = datetime(2026, 3, 11, 1, tzinfo=ZoneInfo("UTC"))
    said = said_by_node(tmp_path, launched, "UTC", monkeypatch)
    assert said["given"] == [0, 2, 0, 0]
    assert said["kinds"] == [True, True, True]
    assert abs(said["again"]) < 1000
    assert abs(said["written"]) < 2000, "text has no milliseconds"
    assert said["inherited"] == pytest.approx(-said["shift"], abs=60_000)


def test_without_a_date_a_launch_stays_as_it_is() -> None:
    launch = Launch(argv=["node", "harness.js"])
    assert told_today(ON_NODE, launch, context()) is launch
