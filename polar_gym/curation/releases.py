"""Compares two releases and writes the difference as the patches of a task.

The base is the old release's tree. Changed files below an import package are the reference solution. Changed test files
are the hidden tests. All other files (documentation, changelog, build files) are in no patch. Only their words serve
the instruction.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from polar_gym.curation import CurationError
from polar_gym.curation.git import run_git
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
    packages = _packages(new) | _packages(old)
    with tempfile.TemporaryDirectory(prefix="polar-gym-") as scratch:
        repository = Path(scratch, "repository")
        base_commit = make_repository(old, repository)
        git = partial(_git, new, "--git-dir", str(repository / ".git"), "--work-tree", ".", "--literal-pathspecs")
        git("add", "--all", "--force")
        diff = partial(git, "diff", "--cached", "--binary", "--no-renames", "--no-color")
        changed = [path for path in diff("--name-only", "-z").split("\0") if path and not _IGNORED.search(path)]
        tests = [path for path in changed if is_test(path)]
        sources = [path for path in changed if path not in tests and _below(path, packages)]
        modules = [path for path in tests if is_test_module(path) and (new / path).is_file()]
        if not sources:
            raise CurationError("no source file changed between the two trees; choose others")
        if not modules:
            raise CurationError("no test module changed between the two trees (an sdist may hold none); choose others")
        return Comparison(
            base_commit=base_commit,
            patch=diff("--", *sources),
            test_patch=diff("--", *tests),
            test_modules=modules,
            import_roots=sorted({str(PurePosixPath(package).parent) for package in packages}),
        )


def is_test(path: str) -> bool:
    """Return whether a file belongs to the tests, by the name of the file or of a directory above it."""
    pure = PurePosixPath(path)
    return bool(_TEST_DIRECTORIES & set(pure.parts[:-1])) or _TEST_FILE.fullmatch(pure.name) is not None


def is_test_module(path: str) -> bool:
    """Return whether a file is one that pytest runs, by its name."""
    return re.fullmatch(r"(test_.*|.*_tests?)\.py", PurePosixPath(path).name) is not None


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


def _below(path: str, packages: Iterable[str]) -> bool:
    return any(map(PurePosixPath(path).is_relative_to, packages))


def _git(directory: Path, *arguments: str) -> str:
    """Run git in a directory. Raises `CurationError`."""
    try:
        return run_git(directory, *arguments).decode()
    except UnicodeDecodeError as error:
        raise CurationError("the releases differ in text that is not UTF-8; choose others") from error
