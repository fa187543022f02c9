"""Has tests import the workspace where the environment holds a copy of its packages.

`in_sandbox/polar_gym_copies.py` finds the copies, and `in_sandbox/sitecustomize.py` puts the workspace before them.
"""

from __future__ import annotations

from collections.abc import Mapping

from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.witness import IN_SANDBOX
from polar_gym.runtimes import Command, Sandbox

PROGRAM = b"import sys\nsys.path = list(filter(None, sys.path))\n" + (IN_SANDBOX / "polar_gym_copies.py").read_bytes()
"""Comes by stdin, and begins so, because it would import modules of the directory in which it runs."""

MARK = ">>>>> The tests would import an installed copy"
PROBLEM = "the tests import the image's copy of the package, not the workspace"

ROOTS = "POLAR_GYM_ROOTS"
"""The variable with the directories of the workspace that go before installed packages."""

_RUN = 'python=$(command -v python || command -v python3) || exit 0; "$python" - "$@" || :'
"""Runs the program where the sandbox has a Python. One that cannot run it runs no tests either."""


async def before_copies(sandbox: Sandbox, workspace: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return this environment of a command with the variable by which tests import a pristine workspace.

    The copies are those of the Python on PATH, which need not be the one that runs the tests. So a package of which
    only the copy has its compiled modules is left alone. Raises `EvaluatorError` and `SandboxError`.
    """
    argv = ["sh", "-c", _RUN, "sh", workspace, MARK]
    found = await sandbox.exec(Command(argv=argv, environment=environment, stdin=PROGRAM))
    if found.timed_out:
        raise EvaluatorError("Python does not list the packages that the environment has: timed out")
    return {**environment, ROOTS: found.stdout.decode(errors="surrogateescape")}
