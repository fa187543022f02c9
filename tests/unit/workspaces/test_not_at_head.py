"""What of a repository a run leaves out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from polar_gym.workspaces.repository import not_at_head


def test_names_may_have_any_encoding(tmp_path: Path) -> None:
    """Guards against a traceback where HEAD holds a name that is not UTF-8."""
    own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    (tmp_path / os.fsdecode(b"gr\xfcn.txt")).touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run([*own, *command], check=True)
    assert not_at_head(tmp_path) == []
    (tmp_path / os.fsdecode(b"bl\xe5.txt")).touch()
    assert not_at_head(tmp_path) == [r"bl\xe5.txt"]
