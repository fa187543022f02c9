"""An attack: what an agent writes, and what the agent hopes for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.lifecycle.attacks.grounds import PACKAGES, PYTHON, TESTS, Ground, forged_log
from tests.support.shell import heredoc


@dataclass(frozen=True)
class Attack:
    """What an agent writes, and what the agent hopes for."""

    name: str
    tries: str
    files: dict[str, str] = field(default_factory=dict)
    """Path -> what is appended to the file. `PACKAGE` is the task's package, `TESTS` the file of its tests, `LOG` the
    log of a run in which all tests passed."""
    commands: tuple[str, ...] = ()
    grounds: tuple[Ground, ...] = PYTHON

    def script(self, ground: Ground) -> str:
        """Return the shell commands that carry the attack out."""

        def filled(text: str) -> str:
            return text.replace("PACKAGE", PACKAGES[ground]).replace("TESTS", TESTS[ground])

        lines = []
        for path, text in self.files.items():
            text = filled(text).replace("LOG", repr(forged_log(ground)))
            lines.append(f'mkdir -p "$(dirname {filled(path)})" && cat >> {filled(path)} {heredoc(text)}')
        return "\n".join([*lines, *map(filled, self.commands)])


FORGE_AND_LEAVE = """
import os
for name in os.listdir("/proc/self/fd"):  # the runner may have put its own output elsewhere
    try:
        if os.readlink("/proc/self/fd/" + name).startswith("pipe:"):
            os.write(int(name), LOG.encode())
    except OSError:
        pass
os._exit(0)
"""
