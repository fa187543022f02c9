"""One sandbox of a provider: how it is filled, how commands run in it through its relay, and how it ends.

The relay runs as root, and the agent as a user who can neither kill nor change it. One `kill -9 -1` as that user ends
all that the agent started. Where a sandbox is no more than a user of a shared machine, the agent has the relay's uid,
each command runs under `subreaper.py`, and the paths of the sandbox must be free there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from polar_gym.runtimes import (
    HOME,
    PROXY_PORT,
    TOOLCHAIN,
    Command,
    SandboxError,
    SandboxRequest,
    agent,
    files,
    relay,
    scratch_directory,
)
from polar_gym.runtimes.kernel.listener import GATEWAY_SOCKET, listen_at
from polar_gym.runtimes.kernel.uids import Claim
from polar_gym.runtimes.lasting import LastingSandbox
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.relay import commands
from polar_gym.runtimes.relay.link import Stream
from polar_gym.runtimes.relay.tether import Tether
from polar_gym.runtimes.remote.layers import Layer, put
from polar_gym.runtimes.remote.provider import Connectable, Handle, Provider
from polar_gym.runtimes.remote.shell import Shell
from polar_gym.runtimes.remote.streams import Connect, as_os_errors
from polar_gym.runtimes.threads import finish, to_its_end

log = logging.getLogger(__name__)

SUBREAPER = Path(__file__).parents[1] / "in_sandbox" / "subreaper.py"
HANDLE = "handle.json"
"""The file in the scratch directory by which a later gateway ends the sandbox: its handle, its deadline, and the paths
that it has taken of a shared machine."""

SILENT_SECONDS = 1.0
"""A sandbox that was not heard for so long is asked whether it lives, before it is connected to again."""

GIVE_UP_SECONDS = 120.0
"""The time for the removal of a sandbox that did not start."""

CLOSE_SECONDS = 300.0
"""The time that a provider has to remove a sandbox. After that the removal has failed, and is tried again later."""

SETUP = "command -v python3 > /dev/null && mktemp -d /tmp/polar-gym-XXXXXXXX && id -u"

TAKE = """
set -e
mark=/tmp/polar-gym-taken-$(id -u)
old=$(find "$mark" -user "$(id -u)" -mmin +10 2> /dev/null || true)
if [ -n "$old" ] && ! kill -0 "$(cat "$mark")" 2> /dev/null; then
    chmod -R u+rwX "$@" 2> /dev/null || true
    for each; do [ ! -d "$each" ] || find "$each" -mindepth 1 -delete; done
fi
for each; do
    [ -z "$(ls -A "$each" 2> /dev/null)" ] || { echo "$each is not empty"; exit 1; }
    mkdir -p "$each"
    [ -w "$each" ] || { echo "$each is not writable"; exit 1; }
done
: > "$mark"
echo "$mark"
"""
"""The script that takes the paths of a sandbox where the machine is shared; the arguments are the paths. The file that
it prints will hold the relay's process. What a dead relay left, or one that never came up, is removed after ten
minutes."""

LEAVE = """
relay=$(cat "$1")
while kill "$relay" 2> /dev/null && ! grep -q '^State:.Z' "/proc/$relay/status" 2> /dev/null; do sleep 0.05; done
rm -f "$1"
shift
chmod -R u+rwX "$@" 2> /dev/null
for each; do find "$each" -mindepth 1 -delete; rmdir "$each" 2> /dev/null; done
true
"""
"""The script that ends the relay and empties these paths; the arguments are the mark, and the paths. A relay is a
zombie, which `kill` still finds, where the machine's first process does not wait for it."""


LIVES = """
tr -d '\\000' 2> /dev/null < "/proc/$1/cmdline" | grep -q relay && exit
cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2> /dev/null | grep -q '^oom_kill [1-9]' \\
    && echo 'out of memory: its relay was killed' || echo 'its relay was killed'
"""
"""The script that prints why the relay, a process, is dead; nothing where it lives."""


class RemoteSandbox(LastingSandbox):
    """A sandbox of a provider. `stop` may be called at any time after `create`."""

    def __init__(
        self,
        provider: Provider,
        handle: Handle,
        request: SandboxRequest,
        layers: Sequence[Layer],
        scratch: Path,
        turn: asyncio.Lock | None,
        until: float,
    ) -> None:
        """`turn`: held by this sandbox, and released at its end: it is a user of a shared machine. None: it is not.
        `until`: the Unix time after which the provider ends the sandbox."""
        super().__init__(request, Claim(agent.UID))
        self._provider = provider
        self._handle = handle
        self._layers = layers
        self._scratch = scratch
        self._turn = turn
        self._until = until
        self._relay = ""
        """The relay's process, inside."""
        self._shared = turn is not None
        self._shell = Shell(provider, handle, None if self._shared else "root")
        self._tether: Tether | None = None
        self._directory = ""
        """The relay's, inside."""
        self._taken: list[str] = []
        """The mark and the paths of a shared machine that are to be emptied at the end."""
        self._ended = False

    async def start(self, connect: Connect, web: int) -> None:
        """Fill the sandbox and start its relay, which listens for streams on the port `web`. Raises `SandboxError`."""
        await self._describe()
        self._directory, uid = (await self._shell.run(SETUP, problem="it needs python3 and mktemp")).split()
        if uid != "0" and not self._shared:
            raise SandboxError(
                f"commands of the provider run as uid {uid}, also where user=root is asked for: the relay must be "
                "root's, so that the agent cannot change it; use an image whose user is root"
            )
        program = f"{self._directory}/relay.pyz"
        await self._shell.send(relay.program(), program)
        await self._prepare()
        await put(self._shell, self._layers, self._directory)
        python = f"{f'env -i PATH={agent.PATH} ' if self._shared else ''}python3 -I -S {program}"
        port = 0 if self._request.served is None else PROXY_PORT
        token, for_web = secrets.token_urlsafe(32), ""
        if web:
            await self._shell.send(token.encode(), f"{self._directory}/token")
            for_web = f" {web} {self._directory}/token"
        port, self._relay = (await self._shell.run(f"{python} serve {self._directory}/relay {port}{for_web}")).split()
        if self._shared:
            await self._shell.run(f"echo {self._relay} > {self._taken[0]}")
        self.base_url = f"http://127.0.0.1:{port}"
        if self._request.served is not None:
            self.server = await self._request.served(listen_at(self._scratch))
        attach = f"exec python3 -I -S {program} attach {self._directory}/relay"
        gateway = None if self._request.served is None else self._scratch / GATEWAY_SOCKET

        async def stream() -> Stream:
            await self._check_life()
            return await connect(self._handle, attach, token)

        self._tether = Tether(stream, gateway)
        if self._request.workspace is not None:
            archive = await asyncio.to_thread(files.pack, self._request.workspace)
            await files.unpack(self, archive, self._request.spec.workspace.path)

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        argv, environment, uid = self._resolved(command)
        assert self._tether is not None
        try:
            code = await commands.run(
                self._tether.open(),
                argv,
                environment=environment,
                uid=uid,
                stdin=command.stdin,
                stdout=stdout.feed,
                stderr=stderr.feed,
            )
        except (ConnectionResetError, commands.CommandError) as error:
            if self.stopped:
                return None
            raise self._tether.problem() from error
        return None if self.stopped else code

    async def _check_life(self) -> None:
        """Raise `SandboxError` where a sandbox that is silent is dead, with the reason; `OSError` where it may live."""
        assert self._tether is not None
        if asyncio.get_running_loop().time() - self._tether.link.heard < SILENT_SECONDS:
            return
        with as_os_errors():
            status = await self._provider.status(self._handle)
        status = getattr(status, "value", status)
        if status in ("stopped", "error"):
            late = time.time() >= self._until
            raise SandboxError("it expired (runtime.ttl_seconds)" if late else f"it was evicted, and is {status} now")
        try:
            dead = await self._shell.run(LIVES, self._relay) if status == "running" else ""
        except SandboxError as error:
            raise OSError(str(error)) from error
        if dead:
            raise SandboxError(dead)

    def _resolved(self, command: Command) -> tuple[Sequence[str], dict[str, str], int | None]:
        """Return argv, environment and uid with which the relay runs a command."""
        if self._shared:
            run = ("python3", "-I", "-S", f"{self._directory}/subreaper.py", str(command.workdir), *command.argv)
            return run, {"PATH": agent.PATH, **command.environment}, None
        run = ("/bin/sh", "-c", agent.RUN_AT, "sh", str(command.workdir), *command.argv)
        return run, {agent.EXPORTS: agent.exports(command.environment)}, self.claim.uid

    async def kill_agent(self) -> None:
        assert self._tether is not None
        try:
            await commands.kill(self._tether.open())
        except commands.CommandError as error:
            raise SandboxError(str(error)) from error
        except ConnectionResetError as error:
            raise self._tether.problem() from error

    async def end(self) -> None:
        if self._ended:
            return
        if self._tether is not None:
            await self._tether.close()
        await end(self._provider, self._handle, self._taken)
        self._ended = True

    async def remove(self) -> None:
        await to_its_end(scratch_directory.remove, self._scratch)
        self._release_turn()

    async def give_up(self) -> None:
        """Stop a sandbox that did not start, and release its turn also where that fails.

        Then the scratch directory stays, by which a later gateway may end the sandbox, and the next sandbox on a
        shared machine takes the paths (TAKE), or says that they are not empty.
        """
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self.stop()
        except (SandboxError, OSError) as error:
            session_id = self._request.session_id
            log.error("session %s: a sandbox that did not start could not be removed: %r", session_id, error)
        finally:
            self._release_turn()

    def _release_turn(self) -> None:
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    async def _describe(self) -> None:
        if isinstance(self._provider, Connectable):
            handle = await self._provider.serialize_handle(self._handle)
            described = {"handle": handle, "until": self._until, "taken": self._taken}
            (self._scratch / HANDLE).write_text(json.dumps(described))

    async def _prepare(self) -> None:
        """Make the agent's directories, and its user where it has one of its own."""
        paths = [HOME, self._request.spec.workspace.path]
        if self._shared:
            paths.append(TOOLCHAIN)
            mark = await self._shell.run(TAKE, *paths, problem="these paths must be empty, and this user's to write")
            self._taken = [mark, *paths, self._directory]
            await self._describe()
            await self._shell.send(SUBREAPER.read_bytes(), f"{self._directory}/subreaper.py")
        else:
            await self._shell.run(agent.PREPARE, *paths, str(self.claim.uid), *agent.accounts(self.claim.uid).values())


async def end(provider: Provider, handle: Handle, taken: Sequence[str] = ()) -> None:
    """End a sandbox, and leave what it has `taken` of a shared machine. Raises `SandboxError`."""
    if taken:
        await Shell(provider, handle, None).run(LEAVE, *taken)
    try:
        with as_os_errors():
            await finish(_close(provider, handle))
    except OSError as error:
        raise SandboxError(f"the sandbox {handle.sandbox_id} could not be removed: {error}") from error


async def _close(provider: Provider, handle: Handle) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await provider.close(handle)
    except TimeoutError as error:
        raise TimeoutError(f"not done within {CLOSE_SECONDS:g} seconds") from error
