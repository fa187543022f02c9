"""Figures of runs, sent by the real clients and read back from their own files. No client reaches a network here."""

from __future__ import annotations

import importlib
import importlib.util
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.learning.report import tracked_line
from polar_gym.runs.run import figures
from polar_gym.tracking import Where, tracked
from tests.support.episodes import forked, make_episode

FIGURES = {"reward": 0.5, "masked": 2, "name": "no number", "interval": (0.0, 1.0)}


def logged(where: Where, directory: Path) -> None:
    with tracked(where, "one", directory, {"harness": "pi"}) as log:
        log(FIGURES, 3)
        log({"reward": 0.75}, 4)


def test_tensorboard_reads_the_figures(tmp_path: Path) -> None:
    logged("tensorboard", tmp_path)
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(tmp_path / "tensorboard" / "one"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["masked", "reward"]
    assert [(each.step, each.value) for each in read.Scalars("reward")] == [(3, 0.5), (4, 0.75)]


def test_mlflow_reads_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = importlib.import_module("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logged("mlflow", tmp_path)
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.info.status, run.data.params) == ("one", "FINISHED", {"harness": "pi"})
    assert run.data.metrics == {"reward": 0.75, "masked": 2.0}
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward")
    assert [(each.step, each.value) for each in history] == [(3, 0.5), (4, 0.75)]


def entries(data: bytes) -> Iterator[bytes]:
    """Yield the entries of a W&B file: 7 bytes, then LevelDB's log, whose entries have a head of 7 bytes, in blocks."""
    place, parts = 7, b""
    while place < len(data):
        if (left := -place % 32768) < 7 and left:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


def test_wandb_writes_the_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    code = "import sys; from pathlib import Path; from tests.lifecycle.test_tracking import logged; "
    code += "logged('wandb', Path(sys.argv[1]))"  # in a process of its own, as a run is
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=600)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    seen = []
    for data in entries(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(each.key or "/".join(each.nested_key)): each.value_json for each in record.history.item}
            seen.append((int(items["_step"]), float(items["reward"])))
    assert seen == [(3, 0.5), (4, 0.75)]


def test_a_missing_client_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(ConfigError, match=r"rollout\.metrics=wandb: wandb is missing; install: pip install .*wandb"):
        load_config("demo", ["rollout.metrics=wandb"])


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.metrics='comet'.*'none', 'wandb', 'mlflow' or 'tensorboard'"):
        load_config("demo", ["rollout.metrics=comet"])


def test_a_tracker_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with (
        pytest.raises(ConfigError, match=r"rollout\.metrics=tensorboard: .*Error"),
        tracked("tensorboard", "one", tmp_path, {}),
    ):
        pass


def test_a_tracker_that_fails_later_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    with tracked("tensorboard", "one", tmp_path, {}) as log:
        monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", full)
        log(FIGURES, 1)
    assert "tensorboard: OSError: no space left" in capsys.readouterr().err


def test_a_masked_episode_is_in_no_mean() -> None:
    said = figures([make_episode("a", 1.0, forked(2)), make_episode("b", 0.0), make_episode("c", None)])
    assert (said["episodes"], said["masked"], said["reward"]) == (3, 1, 0.5)
    assert (said["calls"], said["traces"], said["sampled_tokens"], said["trainable_tokens"]) == (2, 2, 6, 6)
    assert "reward" not in figures([make_episode("c", None)])


def test_lines_of_a_training_run_are_named_after_their_kind() -> None:
    assert tracked_line({"step": 2, "reward": 0.5}) == ({"training/reward": 0.5}, 2)
    assert tracked_line({"evaluated": 5, "greedy": True, "harness": "pi", "reward": 1.0}) == (
        {"held_out/pi/greedy/reward": 1.0},
        5,
    )
    assert tracked_line({"cold_start": True, "cold_start_seconds": 3.0}) == ({"cold_start/cold_start_seconds": 3.0}, 0)
