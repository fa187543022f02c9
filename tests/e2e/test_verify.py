"""`polar-gym verify` on the real vLLM: traces are what it saw, and its logprobs come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.episodes.reading import read_episodes
from polar_gym.gateway.proxy.journal import read_journal
from tests.e2e.vllm_server import VllmServer
from tests.support.requirements import need_bubblewrap


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("polar-gym")
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=250, env=wide)


@pytest.fixture(scope="module")
def episodes(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts of pi at temperature 1, its answers kept short."""
    need_bubblewrap()
    output = tmp_path_factory.mktemp("verify") / "episodes.jsonl"
    engine = ["engine=vllm", f"engine.url={vllm_server.url}", "harness.max_output_tokens=200"]
    done = command("rollout", *engine, "runtime=bubblewrap", "tasks.limit=2", f"rollout.output={output}")
    assert "tokens: " in done.stdout, done.stderr
    return output


def test_logprobs_come_back_from_one_forward_pass(episodes: Path, vllm_server: VllmServer) -> None:
    done = command("verify", episodes, "engine=vllm", f"engine.url={vllm_server.url}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: 2 of 2 traces" in done.stdout
    tokens = sum(
        len(c.response_ids) for e in read_episodes(episodes) for c in read_journal(Path(str(e.artifacts.journal)))
    )
    assert tokens > 100
    assert f"{tokens} tokens" in done.stdout
    assert ", 0 beyond 0.0001" in done.stdout


def test_a_trace_with_another_token_fails(episodes: Path, tmp_path: Path) -> None:
    first = json.loads(episodes.read_bytes().splitlines()[0])
    first["trajectory"]["traces"][0]["response_ids"][0] ^= 1
    forged = tmp_path / "forged.jsonl"
    forged.write_text(json.dumps(first) + "\n")
    done = command("verify", forged)
    assert done.returncode == 1
    assert "exact: 0 of 1 traces" in done.stdout
    assert "does not hold what it sampled" in done.stdout
