"""The ways to a stream of bytes into a provider's sandbox, and what shuts the network of providers that we know.

`exec` of the protocol is one-shot, and has no input: it is no stream. A provider without any of these ways is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from polar_gym.runtimes.relay.link import Stream
from polar_gym.runtimes.relay.tether import through
from polar_gym.runtimes.remote.provider import Handle, PtySession, SupportsPty, SupportsStream, pty_spec_of

RIGHTS = ("--add-caps", "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_SETGID,CAP_SETUID")
"""Apptainer's option for what the relay needs as root; an Apptainer may be set to leave root no rights."""

COMMAND_LINES: dict[str, Callable[[str], Sequence[str]]] = {
    "docker": lambda name: ("docker", "exec", "-i", "--user", "0", name),
    "apptainer": lambda name: ("apptainer", "exec", *RIGHTS, f"instance://{name}"),
    "local": lambda _: (),
}
"""Provider of NeMo Gym -> the argv prefix that runs a program in its sandbox of this id."""

CONTAINED = ("--containall", "--writable-tmpfs", "--net", "--network", "none")

DEFAULTS: dict[str, dict[str, Any]] = {
    "docker": {"create": {"network": "none"}},
    "apptainer": {
        "create": {"extra_start_args": [*CONTAINED, *RIGHTS]},
        "exec": {"extra_exec_args": list(RIGHTS)},
    },
}
"""Provider -> arguments of its constructor, with which a sandbox has no network. Those of a config come before them."""


def is_streamed(name: str, provider: type[Any]) -> bool:
    """Return whether a stream can be had from this provider, which is a class."""
    return name in COMMAND_LINES or issubclass(provider, SupportsStream | SupportsPty)


def stream(name: str, provider: object) -> Callable[[Handle, str], Awaitable[Stream]]:
    """Return what opens a stream to a shell command in a sandbox of this provider; it raises `OSError`."""
    if isinstance(provider, SupportsStream):
        return lambda handle, command: through(provider.stream_argv(handle, command))
    if (line := COMMAND_LINES.get(name)) is not None:
        return lambda handle, command: through([*line(handle.sandbox_id), "sh", "-c", command])
    assert isinstance(provider, SupportsPty)

    async def pipes(handle: Handle, command: str) -> PtyStream:
        with as_os_errors():
            return PtyStream(await provider.create_pty(handle, pty_spec_of(command)))

    return pipes


class PtyStream:
    """A stream through a session of a provider, in pipe mode."""

    def __init__(self, session: PtySession) -> None:
        self._session = session

    async def read(self) -> bytes:
        with as_os_errors():
            return await self._session.read()

    async def write(self, data: bytes) -> None:
        with as_os_errors():
            await self._session.write(data)

    async def close(self) -> None:
        with as_os_errors():
            await self._session.close()


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise an `OSError` in place of any error of a provider, with its kind and text."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
