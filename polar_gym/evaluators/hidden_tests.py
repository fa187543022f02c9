"""Puts the hidden tests into a grading sandbox, before any code of the harness is there."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping

from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.runtimes import Command, Sandbox
from polar_gym.runtimes.files import UnreadableFileError, read_file, write_files

_OWN_DIRECTORY = "/tmp/polar-gym-tests"
_OWN = f"""
git() {{ command git -c safe.directory='*' "$@"; }}
own={_OWN_DIRECTORY}
objects=$(cd "$(git rev-parse --git-dir)/objects" && pwd) || exit
mkdir -p "$own/objects"
with_patch() {{ # git that keeps what it knows of the tests in a directory that `read` removes
    env GIT_INDEX_FILE="$own/index" GIT_OBJECT_DIRECTORY="$own/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects" \\
        git -c safe.directory='*' "$@"
}}
"""
"""Begins the scripts below. Blobs of the original tests in the workspace's own `.git` would tell the tested code which
copies are twins."""

_APPLY = f"""
{_OWN}
set -e
cat > "$own/patch"
[ "$1" = list ] || git apply --whitespace=nowarn "$own/patch"
with_patch read-tree HEAD
with_patch apply --cached --whitespace=nowarn "$own/patch"
with_patch diff-index --cached -p --binary --no-renames --no-color --no-ext-diff --src-prefix=a/ --dst-prefix=b/ HEAD
"""
"""Applies the test patch, and prints what the patch changes: a renamed file is removed and made."""

_LIST_FILES = r"""
find . -name .git -prune -o -type f -size -20480 -print0
printf '//\0'
find . -name .git -prune -o \( -type l -o -type f -size +20479 \) -print0
"""
"""Prints the files of a workspace: those of less than 10 MB, `//`, links and the other files. Reading a link could take
as long as its target likes, a pipe's for instance."""

_READ = f"""
{_OWN}
[ -e "$own/index" ] || with_patch read-tree HEAD || exit
for each; do
    with_patch cat-file -e ":$each" 2> /dev/null && with_patch cat-file blob ":$each" | base64 | tr -d '\\n'
    echo
done
rm -rf "$own"
"""
"""Prints the files that its arguments name as the test patch leaves them, one line of base64 for each, and
removes everything that tells of the patch."""

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


async def place(sandbox: Sandbox, patch: str, *, apply: bool) -> list[FileChange]:
    """Return the changes of a test patch, without renames. With `apply`, put the patch into the pristine workspace.

    Raises `EvaluatorError`.
    """
    if not patch.strip():
        return []
    how = "apply" if apply else "list"
    problem = "test_patch does not apply to the base commit"
    return file_changes(await _shell(sandbox, problem, _APPLY, how, stdin=patch.encode()))


async def read(sandbox: Sandbox, files: Collection[str]) -> dict[str, bytes]:
    """Return the files of a pristine workspace as the test patch leaves them, without those that do not exist.

    Call this after `place`, also without files: it removes what git knows of the patch. Raises `EvaluatorError`.
    """
    script = _READ if files else f"rm -rf {_OWN_DIRECTORY}"
    listed = await _shell(sandbox, "the hidden tests cannot be read", script, *files)
    texts = zip(files, listed.split(b"\n"), strict=False)
    return {file: base64.b64decode(text) for file, text in texts if text}


async def importable_modules(sandbox: Sandbox) -> list[str]:
    """Return the top-level modules that Python finds, or that runners look for, outside of a pristine workspace.

    Raises `EvaluatorError`.
    """
    return (await _shell(sandbox, "Python does not list its modules", LIST_MODULES, *OF_RUNNERS)).decode().split()


async def digests(sandbox: Sandbox, chosen: Callable[[str], bool]) -> frozenset[str]:
    """Return `DIGEST  PATH` of those files of the workspace that are chosen by their paths. Of links and large files,
    return the path alone. Raises `SandboxError`."""
    listed = await sandbox.exec(Command(argv=["sh", "-c", _LIST_FILES], output_limit=128 * 1024 * 1024))
    names = [name.removeprefix("./") for name in listed.stdout.decode(errors="surrogateescape").split("\0")]
    short = names.index("//") if "//" in names else len(names)
    read, unread = ([name for name in part if name and chosen(name)] for part in (names[:short], names[short + 1 :]))
    if not read:
        return frozenset(unread)
    stdin = "\0".join(read).encode(errors="surrogateescape")
    told = await sandbox.exec(Command(argv=["xargs", "-0", "sha256sum", "--"], stdin=stdin))
    return frozenset([*told.stdout.decode(errors="replace").splitlines(), *unread])


async def write(sandbox: Sandbox, workspace: str, texts: Mapping[str, bytes]) -> None:
    """Write test files into a workspace. Raises `SandboxError`."""
    await write_files(sandbox, {f"{workspace}/{file}": text for file, text in texts.items()})


async def changed(sandbox: Sandbox, workspace: str, texts: Mapping[str, bytes]) -> list[str]:
    """Return the test files that are no longer as `write` left them. Raises `SandboxError`."""
    found = []
    for file, text in texts.items():
        try:
            same = await read_file(sandbox, f"{workspace}/{file}") == text
        except (FileNotFoundError, UnreadableFileError):
            same = False
        if not same:
            found.append(file)
    return found


async def _shell(sandbox: Sandbox, problem: str, script: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Return the output of a script that prepares a pristine sandbox. Raises `EvaluatorError`."""
    argv = ["sh", "-c", script, "sh", *arguments]
    result = await sandbox.exec(Command(argv=argv, stdin=stdin, output_limit=128 * 1024 * 1024))
    if result.exit_code != 0:
        message = "timed out" if result.timed_out else result.stderr.decode(errors="replace").strip()
        raise EvaluatorError(f"{problem}: {message}")
    return result.stdout
