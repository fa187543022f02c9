"""Compares two releases and writes the difference as the patches of a task.

The base is the old release's tree. Changed files below an import package are the reference solution. Changed test files
are the hidden tests. All other files (documentation, changelog, build files) are in no patch. Only their words serve
the instruction.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polar_gym.curation.errors import CurationError
from polar_gym.workspaces.repository import make_repository

_TEST_DIRECTORIES = {"test", "tests", "testing"}
_TEST_FILE = re.compile(r"(test_.*|.*_tests?|conftest)\.py")
_NOT_PACKAGES = {*_TEST_DIRECTORIES, "doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts"}
_IGNORED = re.compile(r"(^|/)(__pycache__|\.git|[^/]*\.egg-info)(/|$)|\.py[co]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two releases side by side. Paths are relative and in POSIX form."""

    base_commit: str
    patch: str
    """The changed source files: the reference solution."""
    test_patch: str
    """The changed test files."""
    test_modules: list[str]
    """The changed test files of the new release that pytest runs."""
    import_roots: list[str]
    """Directories that must be on the module search path."""


def compare(old: Path, new: Path) -> Comparison:
    """Compare two releases. Raises `CurationError` where they do not make a task."""
    changed = sorted(_changed(old, new))
    packages = _packages(new) | _packages(old)
    tests = [path for path in changed if is_test(path)]
    sources = [path for path in changed if not is_test(path) and any(map(PurePosixPath(path).is_relative_to, packages))]
    modules = [path for path in tests if re.fullmatch(r"(test_.*|.*_tests?)\.py", PurePosixPath(path).name)]
    modules = [path for path in modules if (new / path).is_file()]
    if not sources:
        raise CurationError("no source file changed between these releases; choose others")
    if not modules:
        raise CurationError("no test file changed between these releases, or the sdists hold none; choose others")
    with tempfile.TemporaryDirectory(prefix="polar-gym-") as scratch:
        repository = Path(scratch, "repository")
        base_commit = make_repository(old, repository)
        return Comparison(
            base_commit=base_commit,
            patch=_patch(repository, new, sources),
            test_patch=_patch(repository, new, tests),
            test_modules=modules,
            import_roots=sorted({str(PurePosixPath(package).parent) for package in packages}),
        )


def is_test(path: str) -> bool:
    """Return whether a file belongs to the tests, by the name of the file or of a directory above it."""
    pure = PurePosixPath(path)
    return bool(_TEST_DIRECTORIES & set(pure.parts[:-1])) or _TEST_FILE.fullmatch(pure.name) is not None


def _packages(tree: Path) -> set[str]:
    """Return the import packages and modules at the root, or below `src` or `lib`."""
    found: set[str] = set()
    for root in (tree, tree / "src", tree / "lib"):
        for path in root.glob("*"):
            name = path.relative_to(tree).as_posix()
            if path.name in _NOT_PACKAGES or is_test(name):
                continue
            if (path / "__init__.py").is_file() or (path.suffix == ".py" and path.stem not in ("setup", "noxfile")):
                found.add(name)
    return found


def _changed(old: Path, new: Path) -> set[str]:
    before, after = _files(old), _files(new)
    return {path for path in before | after if before.get(path) != after.get(path)}


def _files(tree: Path) -> dict[str, bytes]:
    """Return the content of each file, by its path."""
    files = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes() for name, path in files.items() if not path.is_symlink() and not _IGNORED.search(name)
    }


def _patch(repository: Path, new: Path, paths: Iterable[str]) -> str:
    """Return the difference that `paths`, taken from `new`, make to the repository. The repository is then reset."""
    for path in paths:
        target = repository / path
        target.unlink(missing_ok=True)
        if (new / path).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new / path, target)
    _git(repository, "add", "--all", "--force")
    diff = _git(repository, "diff", "--cached", "--binary", "--no-renames", "--no-color", "HEAD")
    _git(repository, "reset", "--quiet", "--hard")
    try:
        return diff.decode()
    except UnicodeDecodeError as error:
        raise CurationError("the releases differ in text that is not UTF-8; choose others") from error


def _git(repository: Path, *arguments: str) -> bytes:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=repository, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise CurationError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
