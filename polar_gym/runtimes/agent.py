"""The user that the harness runs as inside every sandbox, and what of the gateway's machine this user may see."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from polar_gym.errors import ConfigError
from polar_gym.paths import shipped_dir
from polar_gym.runtimes import HOME, Runtime
from polar_gym.schema import RuntimeSpec

UID = 1000
"""The agent's uid, and the number of its gid, where no uid is claimed for the sandbox. That is in a user namespace that
was made without root, and in images that were made for another user than root."""

NAME = "agent"

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IDENTITY = {"HOME": HOME, "USER": NAME, "LOGNAME": NAME}
"""Set in every sandbox, also in one whose image brings an environment of its own."""

ENVIRONMENT = {**IDENTITY, "PATH": PATH, "SHELL": "/bin/sh", "LANG": "C.UTF-8"}
"""The environment of a command in a sandbox with the gateway machine's /usr, before the task's and its own."""

EXPORTS = "POLAR_GYM_ENVIRONMENT"
"""The variable that carries a command's environment into the sandbox (`exports`)."""

SET_ENVIRONMENT = f'eval "${EXPORTS}"; unset {EXPORTS}'
"""Shell commands that set the environment, inside the sandbox and as the agent. Programs that run before them, outside
or with root's rights, must not see a task's LD_PRELOAD."""

RUN = 'timeout -s KILL "$@"; code=$?; kill -9 -1 2> /dev/null; exit $code'
"""The script of `sh -c` that runs a command in a sandbox that outlives its commands; the arguments are a number of
seconds and the command. When the command ends, all processes that it left are killed. The seconds end the command where
the gateway has died and cannot."""

RUN_AT = f'{SET_ENVIRONMENT}; cd "$1" || exit 126; shift; {RUN}'
"""The same, with the environment of `EXPORTS`; a first argument more is the directory."""

KILL = ("/bin/sh", "-c", "kill -9 -1")
"""Run as the agent's uid: ends every process of the agent, however the agent hid that process."""

PREPARE = """
set -e
mkdir -p "$1" "$2"
[ -d /tmp ] || mkdir -m 1777 /tmp
chown "$3:$3" "$1"
chown -R "$3:$3" "$2"
grep -q "^[^:]*:[^:]*:$3:" /etc/passwd || printf %s "$4" >> /etc/passwd
grep -q "^[^:]*:[^:]*:$3:" /etc/group || printf %s "$5" >> /etc/group
"""
"""The script that root runs in a new container; the arguments are the agent's home, the workspace, the agent's uid, and
its lines in /etc/passwd and /etc/group."""

BACKSTOP_SECONDS = 30
"""How much later than its time limit a command ends when the gateway is dead."""

ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "group": "root:x:0:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hosts": "127.0.0.1 localhost\n",
}
"""The sandbox's own /etc: file name -> text. The agent's own lines are added when its uid is known."""

HIDDEN = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
)
"""What the kernel tells of the whole machine, and Docker hides."""

USR = Path("/usr")
"""The directory of the gateway's machine that the agent sees, read-only, where the sandbox has no image."""

OWN = shipped_dir("conf").parent.resolve()
"""The installed package, or its checkout. The solutions and hidden tests of the bundled tasks are there."""

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


def accounts(uid: int) -> dict[str, str]:
    """Return the lines of an agent in /etc: file name -> line."""
    return {"passwd": f"{NAME}:x:{uid}:{uid}:{NAME}:{HOME}:/bin/sh\n", "group": f"{NAME}:x:{uid}:\n"}


def exports(environment: Mapping[str, str]) -> str:
    """Return the value of `EXPORTS` for an environment; its names are those of shell variables."""
    return "\n".join(f"export {shlex.quote(f'{name}={value}')}" for name, value in environment.items())


def host_etc() -> list[Path]:
    """Return the paths in the host's /etc that programs in its /usr need, as far as they exist. None is secret."""
    return [path for name in _HOST_ETC if (path := Path("/etc", name)).exists()]


def hidden(parent: str) -> list[Path]:
    """Return the paths of `HIDDEN` below a directory that this machine has."""
    return [Path(path) for path in HIDDEN if path.startswith(f"{parent}/") and Path(path).exists()]


def hidden_in_usr() -> list[Path]:
    """Return the directories below the host's /usr that an agent must not see; all others there are shown."""
    return [OWN] if OWN.is_relative_to(USR) else []


def check_unseen(spec: RuntimeSpec, runtime: Runtime | Callable[..., Runtime], files: Mapping[str, Path]) -> None:
    """Raise `ConfigError` where sandboxes of this runtime, or class of runtimes, show one of these files.

    `files`: the key that names a file or directory of the gateway's machine -> its path.
    """
    if spec.image is not None or not getattr(runtime, "shows_usr", False):
        return
    for key, path in files.items():
        real = path.resolve()
        if real.is_relative_to(USR) and not any(real.is_relative_to(hidden) for hidden in hidden_in_usr()):
            raise ConfigError(
                f"{key}={str(path)!r}: it is below {USR}, which a harness without an image can read; move it to a "
                "directory outside, such as /srv, or set runtime.image"
            )


def host_root_links() -> dict[str, str]:
    """Return the links in the host's root directory into /usr, such as `/bin` -> `usr/bin`."""
    names = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
    return {f"/{name}": str(Path("/", name).readlink()) for name in names if Path("/", name).is_symlink()}
