"""What `curation.Bench` keeps on the disk while it grades one task after the other; with real sandboxes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from polar_gym.curation.bench import Bench
from polar_gym.runtimes import Command
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks import Task
from tests.support.requirements import need_bubblewrap


def task(directory: Path, name: str) -> Task:
    workspace = directory / name
    workspace.mkdir()
    (workspace / "file").write_text(name)
    return Task(instance_id=name, problem_statement="It breaks.", workspace=str(workspace), test_command="true")


async def test_a_repository_goes_when_no_sandbox_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a disk that hundreds of candidates fill, and against a sandbox that loses its files to another."""
    need_bubblewrap()
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    first, second = task(tmp_path, "first"), task(tmp_path, "second")
    async with Bench(RuntimeSpec(name="bubblewrap"), tmp_path, keep_bytes=0) as bench:
        async with bench.sandbox(first) as sandbox:
            for each in (first, second):
                async with bench.sandbox(each):
                    pass
            assert len(list(temporary.glob("polar-gym-bench-*/repository-*"))) == 1
            assert (await sandbox.exec(Command(argv=["cat", "file"]))).stdout == b"first"
        assert not list(temporary.glob("polar-gym-bench-*/repository-*"))
