"""Finds where a sandbox tells more than the task does: the solution, the benchmark's name, helpers that tests trust."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import PurePosixPath

from polar_gym.curation.bench import Bench
from polar_gym.curation.pytest_script import patched_files
from polar_gym.curation.trial import run
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.evaluators.protected import TaskFiles
from polar_gym.runtimes import Command, Sandbox
from polar_gym.tasks import Task

NAMED = 5
"""The number of places that one finding names at most."""

NOT_SEARCHED = (
    f"the solution was not looked for: it adds no line of 30 or more characters, or its files have the {NAMED} longest"
)

_HELPER = re.compile(r"(^|[_/.])(tests?|testing|helpers?|fixtures?|mocks?|fakes?|stubs?)([_/.]|$)")
_GIT = """
git() { command git -c safe.directory='*' "$@"; }
"""
_FIND = "find / -path /proc -prune -o -path /sys -prune -o -path /dev -prune -o"
_PATCHES = ("*.jsonl", "*.patch", "*.diff")
"""Names of files that may hold rows of tasks, or patches."""
_NEW_LINE = _GIT + 'for line; do git grep -qF -e "$line" HEAD -- FILES || { printf %s "$line"; exit; }; done'
"""Prints the first of some lines that the changed files do not have yet."""
OBJECTS = f"""{_GIT}
git grep -qF -e "$1" HEAD && exit
git cat-file --batch-all-objects --batch --buffer 2> /dev/null | grep -aoF -m 1 -e "$1"
"""
_NAMES = f"""{_GIT}
{{ env; pwd; id; hostname; git log --all --format='%an %ae %s %d'; git config -l; git remote -v; git stash list
  find / -xdev -maxdepth 3 -not -path '/proc/*'; }} 2> /dev/null | grep -iE -e "$1"
"""
_LOADED = r"""
export PYTHONVERBOSE=1 PYTEST_ADDOPTS=-s
{ COMMAND
} 2>&1 | sed -nE "s,.*(matches|code object from) '?$PWD/(.*\.py)'?$,\2,p" | sort -u
"""
"""Prints the files of the workspace that a Python command imports."""


async def leaks(task: Task, bench: Bench) -> list[str]:
    """Return a line for each finding in a sandbox as the agent gets it, and `NOT_SEARCHED`. Raises `SandboxError`."""
    changed = [change.path.decode(errors="replace") for change in file_changes(task.patch.encode())]
    added = set(re.findall(r"^\+(?!\+\+ )[ \t]*(\S.{28,}\S)", task.patch, re.MULTILINE))
    longest = sorted(added, key=lambda line: (-len(line), line))[:NAMED]
    async with bench.sandbox(task, for_agent=True) as sandbox:

        async def lines(script: str, *arguments: str) -> list[str]:
            command = Command(argv=["sh", "-c", script, "sh", *arguments], timeout_seconds=300.0)
            return (await sandbox.exec(command)).stdout.decode(errors="replace").splitlines()

        found: list[str] = []
        new = await lines(_NEW_LINE.replace("FILES", shlex.join(changed)), *longest)
        for line in new:
            named = dict.fromkeys([*(PurePosixPath(file).name for file in changed), *_PATCHES])
            names = " -o ".join(f"-iname {shlex.quote(name)}" for name in named)
            grep = r'grep -laF -e "$1" -e "$2" -e "$3" {} +'
            holding = rf'{_FIND} -path "$PWD/.git" -prune -o -type f \( {names} \) -exec {grep}'
            forms = (line, json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1])
            places = await lines(holding, *forms)
            found += _finding("a line of the solution is in a file", places)
            found += _finding("a line of the solution is in the git history", await lines(OBJECTS, line))
        if not new:
            found.append(NOT_SEARCHED)
        places = await lines(copies_of(task.repo.rpartition("/")[2]))
        found += _finding("a release of the package is outside of the workspace", places)
        words = rf"swe-?(bench|gym|smith)|sweb\.|{re.escape(task.instance_id)}"
        return found + _finding("the sandbox names the benchmark", await lines(_NAMES, words))


def copies_of(package: str) -> str:
    """Return a script that prints where a package is outside of the workspace: installed, packed, or vendored."""
    name = re.sub(r"[-_.]+", "[-_.]", package)
    released = [f"-iname '{name}-[0-9]*{end}'" for end in (".dist-info", ".egg-info", ".whl", ".tar.gz")]
    vendored = [f"-ipath '*/_vendor/{name}{end}'" for end in ("", ".py")]
    return rf'{_FIND} -path "$PWD" -prune -o \( {" -o ".join(released + vendored)} \) -print'


async def open_helpers(sandbox: Sandbox, task: Task) -> list[str]:
    """Return a finding if the hidden tests load helpers that a solution may change. Raises `SandboxError`."""
    tests = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
    files = TaskFiles(owned=patched_files(task.test_patch), tests=tests, command=task.test_command)
    script = _LOADED.replace("COMMAND", task.test_command or "true")
    loaded = (await run(sandbox, task, task.patch.encode(), script)).stdout.decode(errors="replace")
    helpers = [file for file in loaded.splitlines() if _HELPER.search(file) and f"+++ b/{file}\n" not in task.patch]
    open_ones = [file for file in helpers if not files.protects(FileChange(file.encode(), new=False, section=b""))]
    return _finding("the tests trust a file that a solution may change", open_ones)


def _finding(what: str, places: list[str]) -> list[str]:
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return [f"{what}: {', '.join(places[:NAMED])}{more}"] if places else []
