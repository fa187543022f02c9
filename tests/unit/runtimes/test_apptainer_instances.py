"""The end of instances that a scratch directory names, without Apptainer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from polar_gym.runtimes.apptainer.instance import end_instances


def test_a_process_that_has_an_old_instances_number_is_left_alone(tmp_path: Path) -> None:
    """Guards against SIGKILL for any process of the machine: after a restart, the number in a file is another one's."""
    file = tmp_path / "apptainer" / "instances" / "app" / "host" / "root" / "polar" / "polar.json"
    file.parent.mkdir(parents=True)
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    file.write_text(json.dumps({"pid": other.pid}))
    end_instances(tmp_path)
    out, _ = other.communicate(b"alive", timeout=60)
    assert (out, other.returncode) == (b"alive", 0)
