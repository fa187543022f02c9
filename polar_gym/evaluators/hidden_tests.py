"""Puts the hidden tests into a grading sandbox, before any code of the harness is there."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Collection, Mapping

from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.patch import unquoted
from polar_gym.evaluators.swebench_report import END, EXIT_CODE, START
from polar_gym.runtimes import Command, Sandbox, SandboxError
from polar_gym.runtimes.files import read_file, write_files

_APPLY = """
set -e
git() { command git -c safe.directory='*' "$@"; }
cat > /tmp/polar-gym-test.patch
[ "$1" = list ] || git apply --whitespace=nowarn /tmp/polar-gym-test.patch
export GIT_INDEX_FILE=/tmp/polar-gym-index
git read-tree HEAD
git apply --cached --whitespace=nowarn /tmp/polar-gym-test.patch
git diff-index --cached --name-only --no-renames HEAD
rm /tmp/polar-gym-test.patch
"""
"""Applies the test patch and lists the paths that the patch touches, old names of renamed files included."""

_READ = """
git() { command git -c safe.directory='*' "$@"; }
export GIT_INDEX_FILE=/tmp/polar-gym-index
[ -e "$GIT_INDEX_FILE" ] || git read-tree HEAD || exit
for each; do
    git cat-file -e ":$each" 2> /dev/null && git cat-file blob ":$each" | base64 | tr -d '\\n'
    echo
done
rm -f "$GIT_INDEX_FILE"
"""
"""Prints the files that its arguments name as the test patch leaves them, one line of base64 for each."""

LIST_MODULES = r"""
list='import sys
sys.path[:] = filter(None, sys.path)  # not the workspace
import pkgutil
names = {each[1] for each in pkgutil.iter_modules()}.union(sys.builtin_module_names)
names -= {each[1] for each in pkgutil.iter_modules([".", "src", "lib"])}
print("\n".join(names))'
for python in "$(command -v python3)" "$(command -v python)" /opt/miniconda3/envs/*/bin/python .venv/bin/python; do
    [ ! -x "$python" ] || "$python" -c "$list" || exit 1
done
for module; do
    for root in . src lib; do
        for found in "$root/$module.py" "$root/$module/__init__.py" "$root/$module".*.so; do
            [ ! -e "$found" ] || continue 3
        done
    done
    echo "$module"
done
"""
"""Prints the top-level modules that Python finds outside of the pristine workspace, and those of its arguments that the
workspace lacks."""

OF_RUNNERS = (
    *("unittest", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli"),
    *("pygments", "xdist", "execnet", "nose", "nose2", "coverage", "pytest_cov", "polar_gym_witness"),
)
"""Modules that a test runner imports where they are, installed or not."""

_KILL_LEFTOVERS = """
polar_gym_pid=$$ polar_gym_keep=" "
while [ "${polar_gym_pid:-0}" -gt 0 ]; do
    polar_gym_keep="$polar_gym_keep$polar_gym_pid "
    polar_gym_pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$polar_gym_pid/status")
done
for polar_gym_round in 1 2 3; do
    for polar_gym_each in /proc/[0-9]*; do
        polar_gym_each=${polar_gym_each#/proc/}
        case "$polar_gym_keep" in *" $polar_gym_each "*) ;; *) kill -9 "$polar_gym_each" 2> /dev/null ;; esac
    done
done
"""
"""Ends the processes that the script started before its tests: they may be the tested code's, and change the tests."""

_COPY = ">>>>> The tests would import an installed copy"
_BEFORE_COPIES = """
POLAR_GYM_ROOTS=$("$(command -v python || command -v python3)" {program} {workspace} {mark}) || :
export POLAR_GYM_ROOTS
"""
"""Has the tests import the workspace, even if the environment holds a copy of its packages."""


async def place(sandbox: Sandbox, test_patch: str, *, apply: bool) -> set[str]:
    """Return the paths that the test patch touches. With `apply`, put the patch into the pristine workspace.

    Raises `EvaluatorError`.
    """
    if not test_patch.strip():
        return set()
    how = "apply" if apply else "list"
    problem = "test_patch does not apply to the base commit"
    listed = await _shell(sandbox, problem, _APPLY, how, stdin=test_patch.encode())
    return {unquoted(name).decode(errors="surrogateescape") for name in listed.splitlines()}


async def read(sandbox: Sandbox, files: Collection[str]) -> dict[str, bytes]:
    """Return the files of a pristine workspace as the test patch leaves them, without those that do not exist.

    Call this after `place`. Raises `EvaluatorError`.
    """
    if not files:
        return {}
    listed = await _shell(sandbox, "the hidden tests cannot be read", _READ, *files)
    texts = zip(files, listed.split(b"\n"), strict=False)
    return {file: base64.b64decode(text) for file, text in texts if text}


async def importable_modules(sandbox: Sandbox) -> list[str]:
    """Return the top-level modules that Python finds, or that runners look for, outside of a pristine workspace.

    Raises `EvaluatorError`.
    """
    return (await _shell(sandbox, "Python does not list its modules", LIST_MODULES, *OF_RUNNERS)).decode().split()


async def write(sandbox: Sandbox, workspace: str, texts: Mapping[str, bytes]) -> None:
    """Write test files into a workspace. Raises `SandboxError`."""
    await write_files(sandbox, {f"{workspace}/{file}": text for file, text in texts.items()})


async def changed(sandbox: Sandbox, workspace: str, texts: Mapping[str, bytes]) -> list[str]:
    """Return the test files that are no longer as `write` left them."""
    found = []
    for file, text in texts.items():
        try:
            same = await read_file(sandbox, f"{workspace}/{file}") == text
        except (FileNotFoundError, SandboxError):
            same = False
        if not same:
            found.append(file)
    return found


def under_witness(directory: str) -> str:
    """Return the line of a script after which Python processes run under the witness in this directory."""
    return f'export PYTHONPATH="{directory}${{PYTHONPATH:+:$PYTHONPATH}}"'


def eval_script(script: str, workspace: str, texts: Mapping[str, bytes], witness: str) -> str:
    """Return swebench's script with other texts of the test files, and the tests under the witness in a directory.

    Lines before the tests end the processes that are left, write the files, and put the workspace before a copy that
    the environment has of it. A line after the tests prints the tests' exit code.
    """
    lines = []
    for line in script.strip().split("\n"):  # not `splitlines`: a patch may hold any other line separator
        if START in line:
            first = _workspace_first(workspace, witness)
            prepared = [_KILL_LEFTOVERS, *_writing(workspace, texts), first, under_witness(witness)]
            lines += ["{ set +x; } 2> /dev/null", *prepared, "set -x"]
        if END in line:
            lines += ["POLAR_GYM_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $POLAR_GYM_EXIT_CODE"']
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def tests_copy(log: str) -> bool:
    """Return whether a script's log says that its tests could not import the workspace."""
    return _COPY in log.partition(START)[0]


def _workspace_first(workspace: str, witness: str) -> str:
    program, workspace, mark = map(shlex.quote, (f"{witness}/polar_gym_copies.py", workspace, _COPY))
    return _BEFORE_COPIES.format(program=program, workspace=workspace, mark=mark)


def _writing(workspace: str, texts: Mapping[str, bytes]) -> list[str]:
    return [
        f"base64 -d > {shlex.quote(f'{workspace}/{file}')} <<'POLAR_GYM_END'\n"
        f"{base64.encodebytes(text).decode()}POLAR_GYM_END"
        for file, text in texts.items()
    ]


async def _shell(sandbox: Sandbox, problem: str, script: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Return the output of a script that prepares a pristine sandbox. Raises `EvaluatorError`."""
    argv = ["sh", "-c", script, "sh", *arguments]
    result = await sandbox.exec(Command(argv=argv, stdin=stdin, output_limit=128 * 1024 * 1024))
    if result.exit_code != 0:
        message = "timed out" if result.timed_out else result.stderr.decode(errors="replace").strip()
        raise EvaluatorError(f"{problem}: {message}")
    return result.stdout
