"""Task directories in Harbor's form: three that ship with the tests, and others that a test writes."""

from __future__ import annotations

from pathlib import Path

TASKS = Path(__file__).parent / "harbor"
"""`greet` installs a program outside of its directory, `word-count` has several rewards, `weigh` has variables."""

BASE = "polar-gym/test-base"
"""The image that their Dockerfiles begin with."""

TEST = "#!/bin/sh\n[ -f done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def write_task(
    directory: Path,
    name: str = "task",
    *,
    toml: str = "",
    dockerfile: str = f"FROM {BASE}\nWORKDIR /work\n",
    test: str = TEST,
    solve: str = "#!/bin/sh\ntouch done\n",
) -> Path:
    """Write a task that is solved by a file `done` in its directory, unless the parameters say otherwise."""
    task = directory / name
    files = {"environment/Dockerfile": dockerfile, "tests/test.sh": test, "solution/solve.sh": solve}
    for path, text in {**files, "task.toml": toml, "instruction.md": "Make a file `done`.\n"}.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    return task
