"""Removes the sandboxes and files that a killed agent server leaves.

NeMo Gym kills a server one second after SIGINT. Then no code of the server runs any more, and Docker's containers would
stay. Therefore each server starts one process of this module, which waits for the server's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from polar_gym.config.checking import check_plugin
from polar_gym.runtimes import RUNTIMES, SandboxError
from polar_gym.schema import RuntimeSpec, Session

log = logging.getLogger(__name__)

PAUSES = (0, 10)
"""The seconds before each attempt. Docker may still be making a container when its client dies."""


class Leftovers:
    """The process that removes what is left, and the server's temporary directory, which the process removes too.

    Its standard input is a pipe from the server, which ends with the server. The first line is the runtime. Each other
    line is a session's label: when the session begins, and again when its sandboxes are gone.
    """

    def __init__(self, runtime: RuntimeSpec) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="polar-gym-server-"))
        command = [sys.executable, "-m", __name__, str(self.directory)]
        # A new session: Ctrl-C in a terminal ends the server, and must not end this process too.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._write(runtime.model_dump_json())

    @contextlib.contextmanager
    def watching(self, has_left: Callable[[str], bool]) -> Iterator[Callable[[Session], None]]:
        """Give a listener to the changes of a row's sessions (one that diverged begins again as another one), and write
        down each session until the context ends, or for good where it has left a sandbox then (`Census.has_left`)."""
        begun: list[str] = []

        def note(session: Session) -> None:
            if session.label not in begun:
                begun.append(session.label)
                self._write(session.label)

        try:
            yield note
        finally:
            for label in (label for label in begun if not has_left(label)):
                self._write(label)

    def close(self) -> None:
        """Remove the directory, and wait for the end of the process. Blocks."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process was killed, which `_write` logged
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            log.error("the process that removes a killed server's sandboxes was killed; sandboxes may be left")


async def remove(runtime: RuntimeSpec, sessions: set[str]) -> None:
    found = RUNTIMES.get(runtime.name)(check_plugin("runtime", RUNTIMES, runtime))
    for pause in PAUSES:
        await asyncio.sleep(pause)
        try:
            await found.reap(sessions)
        except (SandboxError, OSError) as error:
            log.error("sandboxes may be left, of sessions %s: %s", ", ".join(sorted(sessions)), error)


def main() -> None:
    runtime = RuntimeSpec.model_validate_json(sys.stdin.readline())
    sessions: set[str] = set()
    for line in sys.stdin:
        sessions ^= {line.strip()}
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if sessions:
        asyncio.run(remove(runtime, sessions))


if __name__ == "__main__":
    main()
