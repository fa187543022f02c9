"""What the tests of the runtimes share: a runtime of each kind, a tiny gateway, and a look at the host's processes."""

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_gym.runtimes import RUNTIMES, Command, Runtime, Sandbox, SandboxRequest, Serve
from polar_gym.runtimes.conformance import examine, specs
from polar_gym.runtimes.laws import LAWS, gateway, sh
from polar_gym.schema import RuntimeSpec, Workspace
from tests.support import apptainer, sandbox_provider
from tests.support.requirements import need, need_bubblewrap

__all__ = ["gateway", "sh"]

MakeRuntime = Callable[..., Any]
"""(options) -> a runtime of the kind that the test runs on."""


OWN = ("bubblewrap", "docker", "apptainer")
"""The runtimes whose sandboxes this package makes itself. The limits of a remote one are its provider's."""

of_own = pytest.mark.parametrize("make_runtime", OWN, indirect=True)


@pytest.fixture(params=[*OWN, "remote"])
def make_runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRuntime]:
    """Makes runtimes of each kind, whose scratch directory is `tmp_path/"scratch"`."""
    scratch = tmp_path / "scratch"
    if request.param == "remote":  # it has sockets there, whose paths must be short
        with tempfile.TemporaryDirectory(prefix="pg-") as short:
            scratch.symlink_to(short)
            with _provider(tmp_path):
                yield lambda **options: make("remote", provider="boxes", scratch=Path(short), **options)
        return
    scratch.mkdir(mode=0o755)
    if request.param == "docker":
        host = request.getfixturevalue("docker_host")
        yield lambda **options: make("docker", host=host, scratch=scratch, **options)
        return
    if request.param == "apptainer":
        program = apptainer.program()
        yield lambda **options: make("apptainer", program=program, scratch=scratch, **options)
        return
    need_bubblewrap()
    yield lambda **options: make("bubblewrap", scratch=scratch, **options)


def _provider(tmp_path: Path) -> contextlib.AbstractContextManager[None]:
    """Offer the provider of tests, whose sandboxes are bubblewrap's."""
    need_bubblewrap()
    if os.geteuid() != 0:
        pytest.skip("the provider of tests needs root")
    return sandbox_provider.installed(tmp_path / "installed")


@pytest.fixture
async def runtime(make_runtime: MakeRuntime) -> AsyncIterator[Runtime]:
    runtime = make_runtime()
    missing = runtime.check()
    need(not missing, "; ".join(missing), "see the message")
    yield runtime
    await runtime.close()


@pytest.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox with an empty workspace and no network."""
    async with started(runtime) as sandbox:
        yield sandbox


def make(kind: str, **options: Any) -> Any:
    plugin: Any = RUNTIMES.get(kind)
    return plugin(plugin.Options(**options))


@contextlib.asynccontextmanager
async def started(
    runtime: Runtime, *, workspace: Path | None = None, serve: Serve | None = None, **request: Any
) -> AsyncIterator[Sandbox]:
    spec = RuntimeSpec(name="any", workspace=Workspace(), environment=request.pop("environment", {}))
    request = {"session_id": "test-session", "spec": spec, **request}
    sandbox = await runtime.start(SandboxRequest(workspace=workspace, serve=serve, **request))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def broken_laws(*arguments: str) -> dict[str, str]:
    """Return the laws of `runtimes.laws` that do not hold for a runtime."""
    (spec,) = specs(arguments)
    found = await examine(spec)
    assert found.keys() == LAWS.keys()
    return {law: problem for law, problem in found.items() if problem}


GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
"""A Python program that prints what a URL answers."""


async def ask_gateway(sandbox: Sandbox) -> str:
    result = await sandbox.exec(Command(argv=["python3", "-c", GET, sandbox.base_url]))
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode().strip()


class Marked:
    """A `sleep` that can be recognised among the host's processes, whatever namespace it hides in."""

    def __init__(self) -> None:
        self.seconds = f"{1000 + secrets.randbelow(1000)}.{secrets.randbelow(10**9):09}"
        self.command = f"sleep {self.seconds}"

    def alive(self) -> bool:
        return bool(self.pids())

    def pids(self) -> list[int]:
        """The processes with this `sleep` as an argument, as the host counts."""
        return [pid for pid, arguments in _command_lines() if self.seconds.encode() in arguments]

    async def until(self, alive: bool) -> None:
        """Wait until there is (or is no) such process."""
        deadline = time.monotonic() + 60
        while self.alive() != alive:
            assert time.monotonic() < deadline, f"{self.command}: alive is still {not alive}"
            await asyncio.sleep(0.01)


def _command_lines() -> Iterator[tuple[int, list[bytes]]]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield int(process.name), (process / "cmdline").read_bytes().split(b"\0")


def host_python() -> str:
    """An interpreter that every user of the machine may run."""
    python = Path("/usr/bin/python3")
    need(python.exists(), str(python), "apt-get install python3")
    need(shutil.which("setpriv"), "setpriv", "apt-get install util-linux")
    return str(python)
