"""Tells which files of a workspace belong to the task. A harness's changes to these files do not count.

The changes are dropped from the harness's diff before the diff is applied. The files stay as the base commit and the
test patch have them:

- files that the test patch touches, files that the listed tests' ids name (below the workspace, or below a directory
  into which the command changes), and the test directories around them (their `conftest.py`, helpers and data);
- where an id names no file, existing test files of languages whose ids do not, such as `*.test.js` and `*_test.go`;
- files of the base commit that the test command itself names, such as `tests/runtests.py`;
- files that steer the test runner or the interpreter from anywhere in the tree (`steering`);
- files that Python would import instead of others: a package or a compiled module beside a test module, a new
  `unittest.py`, a new module, or link to a package, named as an installed one.

A solution may change any source file. Its changes to `pyproject.toml` do not count: the environment of the tests is
built before the harness begins. A helper that only tests import, such as `package/testing.py`, is a source file, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import PurePosixPath

from polar_gym.evaluators.hidden_tests import OF_RUNNERS
from polar_gym.evaluators.patch import FileChange
from polar_gym.evaluators.steering import steers

_TEST_DIRECTORIES = frozenset({"test", "tests", "testing", "__tests__", "spec", "specs"})
_TEST_MODULE = re.compile(r"test.*|.*_tests?|tests?")
_PATH_IN_ID = re.compile(r"([^\s:]+\.\w+)(?:::|$)")
_CHANGES_INTO = re.compile(
    r"(?:^|[\s;&|('\"])(?:cd|pushd|-C|--prefix|--rootdir|--directory|--cwd|--chdir|--dir)[ =]+(?:-- )?['\"]?"
    r"([^\s'\";&|)]+)"
)
_OTHER_TEST = re.compile(
    r".*\.(?:test|spec)\.[cm]?[jt]sx?|.*_test\.go|.*_(?:test|spec)\.rb|.*Tests?\.(?:java|kt|scala|php|cs)"
)
"""Matches the name of a test file in a language whose tests have ids without it."""
_HERE_DOCUMENT = re.compile(r"<<-?[ ]*(['\"]?)(\w+)\1([^\n]*\n).*?^\t*\2$", re.MULTILINE | re.DOTALL)
_DOTTED_ID = re.compile(r"(?:^|\()(\w+(?:\.\w+)+)\)?$")
"""Matches an id of unittest: `tests.test_a.Class.test`, or `test (tests.test_a.Class)`."""
_SOURCE_ROOTS = ("src", "lib")
_METADATA = re.compile(r".*\.(egg|egg-info|dist-info)", re.IGNORECASE)


class TaskFiles:
    """The files of a workspace that belong to the task."""

    def __init__(
        self, *, owned: Iterable[str], tests: Sequence[str], command: str, importable: Iterable[str] = ()
    ) -> None:
        """Take the paths that the test patch touches (`owned`) and the ids of the tests that decide.

        `command` is the command or the script that runs the tests. `importable` are the top-level
        modules that Python finds outside of the pristine workspace.
        """
        self._tests = tests
        self._importable = frozenset(importable)
        roots = _roots(command)
        paths = [_PATH_IN_ID.match(test) for test in tests]
        named = {match[1] for match in paths if match}
        self._in_ids = {str(PurePosixPath(root, file)) for root in roots for file in named}
        self._as_written = {*owned, *named}
        self.test_files = {*owned, *self._in_ids}
        """The test files that the patch and the ids name."""
        self._names_no_files = any(not match or ("::" not in match[0] and "/" not in match[1]) for match in paths)
        modules = [dotted[1].replace(".", "/") for test in tests if (dotted := _DOTTED_ID.search(test))]
        below = (str(PurePosixPath(root, module)) for root in roots for module in modules)
        around = map(_test_directory, (*self.test_files, *below))
        self._directories = {directory for directory in around if directory}
        words = re.split(r"[\s\"'=;&|<>()]+", _HERE_DOCUMENT.sub(r"\3", command))
        self._named_by_command = {str(PurePosixPath(word)) for word in words if word and not word.startswith("-")}
        self._programs = {PurePosixPath(word).name for word in self._named_by_command}

    def with_tests(self, files: Collection[str]) -> set[str]:
        """Return those of these files that the tests' ids name, or all where the ids name none of them.

        Other files of a test patch, even if they look like test modules, may be data of its tests.
        """
        return {file for file in files if file in self._in_ids or self._holds_tests(PurePosixPath(file))} or {*files}

    def protects(self, change: FileChange) -> bool:
        """Return whether this change by the harness does not count."""
        path = PurePosixPath(change.path.decode(errors="surrogateescape"))
        return (
            steers(change, path, self._programs)
            or (change.new and self._hides_a_module(path, link=change.new_link))
            or str(path) in self.test_files
            or any(str(parent) in self._directories for parent in path.parents)
            or any(_imported_instead(path, PurePosixPath(file)) for file in self._as_written)
            or (not change.new and str(path) in self._named_by_command)
            or self._holds_tests(path)
            or (not change.new and self._names_no_files and _is_other_test(path))
        )

    def steers(self, file: str) -> bool:
        """Return whether a file of the workspace steers the tests, or is a helper of theirs. Metadata that a build
        writes does not, except for entry points."""
        path = PurePosixPath(file)
        if path.suffix in (".pyc", ".pyo") or "node_modules" in path.parts:
            return False
        if any(_METADATA.fullmatch(part) for part in path.parts):
            return path.name == "entry_points.txt"
        helps = path.suffix == ".py" and any(str(parent) in self._directories for parent in path.parents)
        change = FileChange(path=file.encode(errors="surrogateescape"), new=False, section=b"")
        return file not in self.test_files and (helps or steers(change, path, self._programs))

    def _hides_a_module(self, path: PurePosixPath, *, link: bool) -> bool:
        """Return whether Python would import this new file in place of a module that is not the workspace's."""
        top = next((part for part in path.parts if part not in _SOURCE_ROOTS), "")
        if link:
            return not top or top.partition(".")[0] in self._importable
        name = top.partition(".")[0]
        if path.suffix not in (".py", ".so") or name not in self._importable:
            return False
        # Python prefers a package elsewhere to a directory without `__init__`, if there is one.
        below = path.parts[path.parts.index(top) + 1 :]
        return name in OF_RUNNERS or not below or below[0].startswith("__init__.")

    def _holds_tests(self, path: PurePosixPath) -> bool:
        """Return whether an id like `tests.test_a.Class.test` names this module, relative to any directory above it."""
        parts = path.with_suffix("").parts
        if not is_test_module(str(path)):
            return False
        names = tuple(".".join(parts[start:]) + "." for start in range(len(parts)))
        return any(f"({name}" in test or test.startswith(name) for test in self._tests for name in names)


def named_by(protected: Iterable[str]) -> Callable[[FileChange], bool]:
    """Return a test of whether a change touches one of these files and directories (relative to the workspace)."""
    mine = {PurePosixPath(path) for path in protected}

    def protects(change: FileChange) -> bool:
        path = PurePosixPath(change.path.decode(errors="surrogateescape"))
        return any(each in (path, *path.parents) for each in mine)

    return protects


def is_test_module(file: str) -> bool:
    """Return whether a path looks like a Python file with tests."""
    path = PurePosixPath(file)
    return path.suffix == ".py" and _TEST_MODULE.fullmatch(path.stem) is not None


def _roots(command: str) -> set[str]:
    """Return the directories that ids may be relative to: the workspace's, and those into which the command changes. Of
    an absolute path, each end may be the part below the workspace."""
    found, here = {PurePosixPath()}, PurePosixPath()
    for into in map(PurePosixPath, _CHANGES_INTO.findall(command)):
        here = PurePosixPath() if ".." in into.parts else here / into
        for path in (here, into):
            found |= {PurePosixPath(*path.parts[start:]) for start in range(len(path.parts))}
    return {str(path) for path in found if not path.is_absolute() and ".." not in path.parts}


def _is_other_test(path: PurePosixPath) -> bool:
    """Return whether a file has the usual name of a test in a language other than Python. `src/main` has no tests."""
    return _OTHER_TEST.fullmatch(path.name) is not None and "main" not in path.parts


def _test_directory(file: str) -> str | None:
    """Return the outermost test directory around a test file."""
    around = (parent for parent in reversed(PurePosixPath(file).parents) if parent.name in _TEST_DIRECTORIES)
    return next(map(str, around), None)


def _imported_instead(path: PurePosixPath, test: PurePosixPath) -> bool:
    """Return whether Python could import `path` in place of a test file, or of a package above it.

    Beside `test_a.py`, these are the package `test_a/` and the compiled `test_a.*.so`.
    """
    if test.suffix != ".py":
        return False
    above = {test.with_suffix(""), *(parent for parent in test.parents if parent.name)}
    if test.with_suffix("") in path.parents:
        return True
    return any(path.parent == each.parent and path.name.startswith(f"{each.name}.") for each in above)
