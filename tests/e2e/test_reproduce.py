"""`recipes/nemo_rl/reproduce.py`, with the real pi on bundled tasks.

NeMo RL and vLLM are a script called `uv`: it trains nothing, and answers as far as the kit looks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polar_gym.paths import shipped_dir
from tests.support.episodes import make_episode
from tests.support.processes import free_port
from tests.support.requirements import need_bubblewrap, need_node

SUITE = shipped_dir("tasks/suite")
SCRIPT = shipped_dir("recipes") / "nemo_rl" / "reproduce.py"
OTHER_MACHINES = """\
import argparse, http.server, json, pathlib, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

words = sys.argv[1:]
values = dict(word.split("=", 1) for word in words if "=" in word)
if "serve" in words:
    parser = argparse.ArgumentParser()  # the options of vLLM 0.25.1 that the kit uses: NeMo RL pins this version
    for name in ("tokenizer", "port", "data-parallel-size", "tool-call-parser", "reasoning-parser"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.parse_args(words[words.index("serve") + 2 :])
    http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Healthy).serve_forever()
elif "--hf-ckpt-path" in words:
    pathlib.Path(words[-1]).mkdir()
else:
    out = pathlib.Path(values["checkpointing.checkpoint_dir"])
    first = out.exists()
    logs = pathlib.Path(values["logger.log_dir"]) / ("exp_002" if first else "exp_001")
    logs.mkdir(parents=True)
    (out / f"step_{3 if first else 1}" / "policy" / "weights" / "iter_0").mkdir(parents=True)
    with (logs / "metrics.jsonl").open("w") as file:
        for step in (2, 3) if first else (1, 2):
            metrics = {"total_reward/mean": step / 4 if first else 0.25}
            for entry in ({"prefix": "train", "metrics": metrics}, {"prefix": "ray", "metrics": {}}):
                file.write(json.dumps({"step": step, **entry}) + "\\n")
    sys.exit(0 if first else 7)
"""
"""The training ends in its first run after step 2, whose checkpoint is not written, and goes on in its second."""


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module, for a machine whose `uv` is the stand-in. Its preflight is left out."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(f"#!{sys.executable}\n{OTHER_MACHINES}")
    (programs / "nvidia-smi").write_text("#!/bin/sh\nyes '50, 81559' | head -n 8\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    path = (programs, Path(sys.executable).parent, os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
    spec = importlib.util.spec_from_file_location("reproduce", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reproduce", module)
    spec.loader.exec_module(module)
    module.STAGES = module.STAGES[1:]
    module.URL = f"http://127.0.0.1:{free_port()}"
    module.PART = 1
    return module


def data(directory: Path) -> Path:
    """Return a directory with the two files of tasks: two bundled tasks each."""
    directory.mkdir()
    bundled = map(json.loads, (SUITE / "tasks.jsonl").read_text().splitlines()[:2])
    rows = [json.dumps(row | {"workspace": str(SUITE / row["workspace"])}) for row in bundled]
    for split in ("train", "validation"):
        (directory / f"{split}_tasks.jsonl").write_text("\n".join(rows))
    return directory


def test_a_run_that_ends_early_goes_on_and_reports(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_node()
    need_bubblewrap()
    settings = ["engine=embedded", "~engine.url", f"tasks.directories=[{SUITE}]"]
    words = ["pi", "--data", str(data(tmp_path / "data")), "--out", str(tmp_path / "out"), *settings]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words, "--nemo-rl", str(tmp_path)])
    with pytest.raises(SystemExit, match="uv ended with status 7; run the same command again"):
        kit.main()
    out = tmp_path / "out" / "pi"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("base*.json*")}
    kit.main()
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("base*.json*")} == before
    figures = json.loads((out / "report.json").read_text())
    assert figures["base"]["value"] == figures["RL"]["value"] == 100
    assert (figures["masked in the base's evaluation"], figures["masked in RL's evaluation"]) == (0, 0)
    assert figures["updates"] == 3
    assert figures["last ten steps"] == pytest.approx((0.25 + 2 / 4 + 3 / 4) / 3)
    assert figures["GPU utilisation, percent"] == 50
    assert figures["hours"] > 0
    assert json.loads((out / "trained.json").read_text())["checkpoint"] == "step_3"
    assert json.loads((out / "base.json").read_text())["tool_calls"]["ok"] > 0
    assert "34.2" in capsys.readouterr().out
    assert len((tmp_path / "data" / "train_rows.jsonl").read_text().splitlines()) == 2


def test_the_preflight_names_everything_that_a_machine_lacks(tmp_path: Path) -> None:
    words = ["codex", "--data", tmp_path, "--out", tmp_path / "out", "--nemo-rl", tmp_path, "--preflight"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    for part in ("GPUs", "train tasks", "validation tasks", "NeMo RL"):
        assert part in done.stderr
    assert "73 steps, 14 hours" in done.stdout
    assert not (tmp_path / "out" / "codex" / "preflight.json").exists()


def a_run(kit: ModuleType, directory: Path) -> Any:
    """Return a run of pi whose results go to a directory."""
    return kit.Run("pi", directory, directory, directory, "policy", [])


def test_a_model_that_solves_nothing_has_a_share_of_0(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "base-0000.jsonl").write_text(make_episode("a", 0.0).model_dump_json() + "\n")
    percent = kit.evaluate(a_run(kit, tmp_path), ["a"], "base")["percent"]
    assert (percent["value"], percent["low"]) == (0.0, 0.0)
    assert percent["high"] > 0


def test_no_other_server_is_taken_for_the_model(kit: ModuleType, tmp_path: Path) -> None:
    run = a_run(kit, tmp_path)
    with (
        kit.serving(run, "the policy of an earlier run", tmp_path / "log"),
        pytest.raises(SystemExit, match="stop that server"),
        kit.serving(run, "trained", tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a"], r"vLLM died: see .*vllm_base\.log"), (["a", "b"], "polar-gym crashed after 1 of 2 sessions")],
)
def test_a_part_that_lacks_engine_or_sessions_is_not_kept(
    kit: Any, tmp_path: Path, names: list[str], said: str
) -> None:
    program = tmp_path / "bin" / "polar-gym"
    program.write_text(
        '#!/bin/sh\nfor word; do case "$word" in rollout.output=*) echo {} > "${word#*=}"; exit 1 ;; esac; done'
    )
    program.chmod(0o755)
    kit.PART = 2
    with pytest.raises(SystemExit, match=said):
        kit.evaluate(a_run(kit, tmp_path), names, "base")
    assert not list(tmp_path.glob("base-*.jsonl"))


def test_the_checkpoints_of_an_earlier_attempt_count_as_free_space(kit: Any, tmp_path: Path) -> None:
    kit.DISK_GIB = shutil.disk_usage(tmp_path).free / 1024**3 + 1
    *_, lacking = kit.machine(a_run(kit, tmp_path))
    with (tmp_path / "checkpoint").open("w") as file:
        file.truncate(2 * 1024**3)
    *_, enough = kit.machine(a_run(kit, tmp_path))
    assert lacking.fix
    assert not enough.fix


def test_each_look_at_the_gpus_is_in_the_file_before_the_next(kit: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gpus.jsonl"
    found: list[int] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            found.append(len(kit.lines(path)))
            return len(found) == 3

    kit.watch_gpus(path, Stop())
    assert found == [0, 1, 2]
    assert len({begun for begun, *_ in kit.lines(path)}) == 1
