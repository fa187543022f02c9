"""Gateways without a daemon, for tests: each runtime, run by root and by a plain user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lifecycle.other_gateway import NOBODY, outputs
from tests.support import apptainer
from tests.support.requirements import need_bubblewrap


@dataclass(frozen=True)
class Gateway:
    """A runtime, and the user who runs it."""

    kind: str
    uid: int
    options: dict[str, str]

    async def outputs(self, *commands: tuple[Sequence[str], str]) -> list[str]:
        return await outputs(*commands, kind=self.kind, uid=self.uid, **self.options)


USERS = [os.geteuid(), NOBODY] if os.geteuid() == 0 else [os.geteuid()]
GATEWAYS = [(kind, uid) for kind in ("bubblewrap", "apptainer") for uid in USERS]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Where every user may write; pytest's own are this user's alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


@pytest.fixture(params=GATEWAYS, ids=str)
def gateway(request: pytest.FixtureRequest, directory: Path) -> Gateway:
    kind, uid = request.param
    if kind == "bubblewrap":
        need_bubblewrap()
        return Gateway(kind, uid, {})
    program = apptainer.program()
    if uid != os.geteuid():
        copy = directory / "apptainer"
        program = str(copy / "bin" / "apptainer") if copy.exists() else apptainer.copy(program, copy)
    return Gateway(kind, uid, {"program": program, "images": str(directory / "images")})
