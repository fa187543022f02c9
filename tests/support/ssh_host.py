"""A machine that answers SSH, for tests: an sshd on a loopback of its own, whose network namespace has no route.

Its user `worker` has the paths that a sandbox needs. Its /home, /opt, /run and /tmp are its own; nothing of this
machine changes. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import need, need_program

PORT = 2222
UID = 4242
WORKSPACE = "/home/workspace"
START = f"""
set -e
for each in /home /opt /run /tmp; do mount -t tmpfs -o mode=0755 tmpfs $each; done
chmod 1777 /tmp
mkdir -p /run/sshd /home/worker /home/agent /opt/polar-gym {WORKSPACE}
chown {UID}:{UID} /home/worker /home/agent /opt/polar-gym {WORKSPACE}
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/group" /etc/group
ip link set lo up
exec "$2" -D -e -f "$1/sshd_config"
"""


@dataclass(frozen=True)
class Host:
    """How `ssh` reaches the machine."""

    process: int
    program: Path
    options: list[str]

    @property
    def config(self) -> dict[str, object]:
        """The arguments of the provider `ssh`."""
        return {"host": "worker@127.0.0.1", "program": str(self.program), "options": self.options}

    def run(self, *argv: str) -> str:
        """Return what a command of root's prints in the machine."""
        enter = ["nsenter", "--target", str(self.process), "--mount", "--net", "--", *argv]
        return subprocess.run(enter, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def ssh_host() -> Iterator[Host]:
    """Run the machine until the block ends."""
    need_program("ssh", "apt-get install openssh-client")
    need_program("ip", "apt-get install iproute2")
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    need(sshd, "sshd", "apt-get install openssh-server")
    assert sshd is not None
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not in /tmp, which the machine has for itself
        (directory := Path(name)).chmod(0o755)
        for key in ("host", "client"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
        users = f"worker:x:{UID}:{UID}::/home/worker:/bin/sh\nsshd:x:4243:4243::/run/sshd:/bin/false\n"
        groups = f"worker:x:{UID}:\nsshd:x:4243:\n"
        known = [
            line for line in Path("/etc/passwd").read_text().splitlines(keepends=True) if not line.startswith("sshd:")
        ]
        (directory / "passwd").write_text("".join(known) + users)
        (directory / "group").write_text(Path("/etc/group").read_text() + groups)
        (directory / "authorized").write_text((directory / "client.pub").read_text())
        (directory / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {PORT}\nHostKey {directory}/host\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"AuthorizedKeysFile {directory}/authorized\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        command = ["unshare", "--mount", "--net", "sh", "-c", START, "sh", str(directory), sshd]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert f"Server listening on 127.0.0.1 port {PORT}" in process.stderr.readline()
                threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block sshd
                (program := directory / "ssh").write_text(
                    f'#!/bin/sh\nexec nsenter --target {process.pid} --net -- ssh "$@"\n'
                )
                program.chmod(0o755)
                known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
                yield Host(process.pid, program, [*known, "-i", str(directory / "client"), "-p", str(PORT)])
            finally:
                process.terminate()
