"""Who the agent is inside every sandbox, and what of the gateway's machine it may see there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from polar_gym.runtimes import HOME

UID = 1000
GID = 1000
NAME = "agent"

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IDENTITY = {"HOME": HOME, "USER": NAME, "LOGNAME": NAME}
"""Set in every sandbox, also in one whose image brings an environment of its own."""

ENVIRONMENT = {**IDENTITY, "PATH": PATH, "SHELL": "/bin/sh", "LANG": "C.UTF-8"}
"""The whole environment of a command, before the task's and its own, where /usr is the gateway machine's."""

EXPORTS = "POLAR_GYM_ENVIRONMENT"
"""The variable in which a command's environment travels (`exports`)."""

SET_ENVIRONMENT = f'eval "${EXPORTS}"; unset {EXPORTS}'
"""Shell commands that set the environment, inside and as the agent: programs that run before them with root's rights,
or outside, must not see a task's LD_PRELOAD."""

RUN = 'timeout -s KILL "$@"; code=$?; kill -9 -1 2> /dev/null; exit $code'
"""What `sh -c` runs a command with (a number of seconds before it) in a sandbox that outlives its commands: when the
command ends, so does what it left behind. The time is for the day the gateway dies and cannot end it itself."""

KILL = ("/bin/sh", "-c", "kill -9 -1")
"""As the agent's uid: ends every process of the agent, however it hid it."""

BACKSTOP_SECONDS = 30
"""How much later than its time limit a command ends when the gateway is dead."""

ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\n{NAME}:x:{UID}:{GID}:{NAME}:{HOME}:/bin/sh\n",
    "group": f"root:x:0:\n{NAME}:x:{GID}:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hosts": "127.0.0.1 localhost\n",
}
"""The sandbox's own /etc: file name -> text."""

_HOST_ETC = (
    "alternatives",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "python3",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)


def exports(environment: Mapping[str, str]) -> str:
    """Return the value of `EXPORTS` for an environment; its names are those of shell variables."""
    return "\n".join(f"export {shlex.quote(f'{name}={value}')}" for name, value in environment.items())


def host_etc() -> list[Path]:
    """What programs in the host's /usr need of its /etc, as far as it exists. Nothing of it is secret."""
    return [path for name in _HOST_ETC if (path := Path("/etc", name)).exists()]


def host_root_links() -> dict[str, str]:
    """`/bin` -> `usr/bin` and the like: the host's root links into /usr."""
    names = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
    return {f"/{name}": str(Path("/", name).readlink()) for name in names if Path("/", name).is_symlink()}
