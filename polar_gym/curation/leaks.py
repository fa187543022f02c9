"""Finds where a sandbox tells more than the task does: the solution, the benchmark's name, helpers that tests trust."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath

from polar_gym.curation.bench import Bench
from polar_gym.curation.pytest_script import patched_files
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.evaluators.protected import TaskFiles
from polar_gym.runtimes import Command, Sandbox
from polar_gym.tasks import Task

NAMED = 5
"""The number of places that one finding names at most."""

_SECONDS = 300.0
_HELPER = re.compile(r"(^|[_/.])(tests?|testing|helpers?|fixtures?|mocks?|fakes?|stubs?)([_/.]|$)")
_PRUNED = r"-path /proc -prune -o -path /sys -prune -o -path /dev -prune -o -path /tmp/polar-gym-audit -prune -o"
_FILES = f"""find / {_PRUNED} -path "$PWD/.git" -prune -o -type f NAMES -exec grep -laF -e "$1" {{}} + 2> /dev/null"""
_PACKAGE = f"""find / {_PRUNED} -path "$PWD" -prune -o NAMES -print 2> /dev/null"""
_NEW_LINE = """
for line; do
    git -c safe.directory='*' grep -qF -e "$line" HEAD -- FILES || { printf '%s' "$line"; exit; }
done
"""
"""Prints the first of some lines that the changed files do not have yet."""
OBJECTS = """
git() { command git -c safe.directory='*' "$@"; }
git grep -qF -e "$1" HEAD && exit
git cat-file --batch-all-objects --batch --buffer 2> /dev/null | grep -aoF -m 1 -e "$1"
"""
_NAMES = """
git() { command git -c safe.directory='*' "$@"; }
{ env; pwd; id; hostname; git log --all --format='%an %ae %s %d'; git config -l; git remote -v; git stash list
  find / -xdev -maxdepth 3 -not -path '/proc/*'; } 2> /dev/null | grep -iE -e "$1"
"""


async def leaks(task: Task, bench: Bench) -> list[str]:
    """Return a line for each finding in a sandbox as the agent gets it. Raises `SandboxError`."""
    found: list[str] = []
    async with bench.sandbox(task, for_agent=True) as sandbox:
        changed = _files(task.patch)
        new_line = _NEW_LINE.replace("FILES", shlex.join(changed))
        if line := "".join(await _lines(sandbox, new_line, *_long_lines(task))):
            names = sorted({shlex.quote(PurePosixPath(file).name) for file in changed})
            files = await _lines(sandbox, _FILES.replace("NAMES", _any_name(names)), line)
            found += _finding("a line of the solution is in a file", files)
            found += _finding("a line of the solution is in the git history", await _lines(sandbox, OBJECTS, line))
        package = re.sub(r"[-_.]+", "[-_.]", task.repo.rpartition("/")[2])
        if package:
            kinds = [shlex.quote(f"{package}-[0-9]*{end}") for end in (".dist-info", ".egg-info", ".whl", ".tar.gz")]
            places = await _lines(sandbox, _PACKAGE.replace("NAMES", _any_name(kinds)))
            found += _finding("a release of the package is outside of the workspace", places)
        words = rf"swe-?(bench|gym|smith)|sweb\.|{re.escape(task.instance_id)}"
        found += _finding("the sandbox names the benchmark", await _lines(sandbox, _NAMES, words))
    return found


def open_helpers(task: Task, loaded: list[str]) -> list[str]:
    """Return a finding if the tests load helpers that a solution may change. `loaded` are the files they load."""
    tests = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
    command = task.test_command or task.eval_script
    files = TaskFiles(owned=patched_files(task.test_patch), tests=tests, command=command)
    solution = set(_files(task.patch))
    helpers = [file for file in loaded if _HELPER.search(file) and file not in solution]
    open_ones = [file for file in helpers if not files.protects(FileChange(file.encode(), new=False, section=b""))]
    return _finding("the tests trust a file that a solution may change", open_ones)


def _long_lines(task: Task) -> list[str]:
    """Return the longest lines that the solution adds and does not remove elsewhere, without short ones."""
    added, removed = (
        {line[1:].strip() for line in task.patch.splitlines() if line.startswith(sign) and line[:3] != sign * 3}
        for sign in "+-"
    )
    long = sorted((line for line in added - removed if len(line) >= 30), key=len, reverse=True)
    return long[:NAMED]


def _files(patch: str) -> list[str]:
    return [change.path.decode(errors="replace") for change in file_changes(patch.encode())]


def _any_name(patterns: list[str]) -> str:
    return r"\( " + " -o ".join(f"-iname {pattern}" for pattern in patterns) + r" \)"


async def _lines(sandbox: Sandbox, script: str, *arguments: str) -> list[str]:
    command = Command(argv=["sh", "-c", script, "sh", *arguments], timeout_seconds=_SECONDS)
    return (await sandbox.exec(command)).stdout.decode(errors="replace").splitlines()


def _finding(what: str, places: list[str]) -> list[str]:
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return [f"{what}: {', '.join(places[:NAMED])}{more}"] if places else []
