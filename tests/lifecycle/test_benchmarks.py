"""The benchmarks measure what they say: their conversations are spliced, their clocks are right."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import stages
from benchmarks.against import earlier_revision
from benchmarks.load import Caller, cpu_seconds
from benchmarks.processes import ROOT, server
from benchmarks.proxy import Gateway
from benchmarks.wires import WIRES, Wire
from polar_gym.gateway.proxy.journal import read_journal

PROMPT = 2048


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_what_goes_on_from_an_answer_is_spliced(wire: Wire, tmp_path: Path) -> None:
    """Guards against a benchmark of splicing whose conversations the gateway takes for new ones."""
    with server("benchmarks.mock_engine") as mock:
        url = f"http://127.0.0.1:{mock.said}"
        options = ("--engine", url, "--state", str(tmp_path), "--sessions", "1")
        with server("benchmarks.gateway_process", *options) as process:
            gateway = Gateway(process.said, process.pid)
            whole = gateway.following(wire, PROMPT, turns=2, sessions=1)
            streamed = gateway.following(wire, PROMPT, stream=True, sessions=1)

            async def ask() -> list[bytes]:
                async with Caller(gateway.port) as caller:
                    return [await caller.ask(each.request(0)) for each in (whole, streamed)]

            one, events = asyncio.run(ask())
    assert events.count(b"data: ") > 1
    assert b"data: " not in one
    (journal,) = tmp_path.rglob("*.jsonl")
    calls = read_journal(journal)
    assert [call.continuation for call in calls] == ["root", "spliced", "root", "spliced", "spliced"]
    assert {len(call.response_ids) for call in calls} == {340}
    assert len(calls[0].prompt_ids) == pytest.approx(PROMPT, rel=0.15)


def test_the_gateways_part_of_a_call_is_measured_beside_the_engine() -> None:
    """Guards against times that are not those of the gateway: an engine that answers at once leaves it most."""
    with server("benchmarks.mock_engine") as mock:
        url = f"http://127.0.0.1:{mock.said}"
        command = [sys.executable, "-m", "benchmarks.real_engine", "--engine", url, "--seconds", "1"]
        done = subprocess.run([*command, "--connections", "1"], cwd=ROOT, capture_output=True, text=True, check=True)
    row = [float(cell) for cell in done.stdout.strip().splitlines()[-1].strip("| ").split("|")]
    (_, first, _, first_added, _, _, _, added, _, share, cpu) = row
    assert first > 0
    assert first_added > 0
    assert 0.5 < share < 1
    assert cpu < 1.5 * added


def test_the_engine_is_idle_only_where_sandboxes_are_made_and_graded_in_its_time() -> None:
    assert stages.staged(16, 2).utilisation > 0.98
    assert stages.one_pool(16, 16).utilisation < 0.8


def test_a_call_costs_no_more_than_before() -> None:
    """Guards against a change that makes calls dearer: the CPU of the gateway beside that of an earlier revision."""
    if earlier_revision() is None:
        pytest.skip("this checkout holds one revision only")
    command = [sys.executable, "-m", "benchmarks.against", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip(f"the earlier revision needs other packages: {done.stderr[-300:]}")
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}"
    assert done.stdout.count("| real streaming |") == 2


def test_cpu_time_is_that_of_the_process() -> None:
    began = cpu_seconds(os.getpid()), time.process_time()
    sum(range(2_000_000))
    assert cpu_seconds(os.getpid()) - began[0] == pytest.approx(time.process_time() - began[1], rel=0.1)
