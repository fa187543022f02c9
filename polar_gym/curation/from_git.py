"""Makes tasks out of the history of a git repository, as SWE-Gym did (arXiv:2412.21139): of commits that change source
files and tests.

A commit of the first-parent history is a candidate; a merge counts as the change that it brings. Both trees are written
out without history, so that no later commit is in a sandbox. The repository's own files tell what the tests need: at
versions of the commit's date, where wheels of that time exist. Each candidate that was tried is a line in a journal
beside the tasks, so that a search that was stopped goes on. A fault of the machine stops the search, and is no line.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.declared import package_name, requirements, version_file
from polar_gym.curation.git import run_git
from polar_gym.curation.making import Say, Trees, UntriedError, append_line, instance_ids, make_known, make_task
from polar_gym.curation.pins import MachineError, python_version, resolve_available
from polar_gym.curation.releases import Comparison, is_test, is_test_module
from polar_gym.curation.statement import Writer, write_statement
from polar_gym.curation.validation import GRADING_ERRORS
from polar_gym.durable import json_lines
from polar_gym.errors import ConfigError
from polar_gym.record import digest
from polar_gym.tasks import Task
from polar_gym.tasks.confined import confined


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A repository whose commits become tasks."""

    git_dir: Path
    name: str
    """`owner/name`."""
    head: str = "HEAD"
    since: datetime | None = None
    """Commits before are left out."""
    extra_requirements: Sequence[str] = ()
    issues: Mapping[int, str] = field(default_factory=dict)
    """Number -> text."""
    writer: Writer | None = None

    @property
    def options(self) -> str:
        """Return a digest of the options with which a commit that fell may become a task, or "" without any."""
        writer = None if self.writer is None else [self.writer.url, self.writer.model]
        given = [sorted(self.extra_requirements), sorted(self.issues.items()), writer]
        return digest(*given) if any(given) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    sha: str
    parent: str
    when: datetime
    message: str
    files: Sequence[str]

    @property
    def lacks(self) -> str:
        """Return the reason for which the commit is no candidate, or "" for a candidate."""
        python = [path for path in self.files if path.endswith(".py")]
        if not self.parent:
            return "it is the first commit"
        if not any(map(is_test_module, python)):
            return "it changes no test file"
        return "" if any(not is_test(path) for path in python) else "it changes no source file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of one candidate."""

    commit: str
    task: str = ""
    """The task's id; empty: the candidate fell."""
    fell: str = ""
    """The step at which the candidate fell."""
    why: str = ""
    options: str = ""
    """The digest of `History.options` that it was tried with."""


def open_history(repository: Path, name: str | None, **options: Any) -> History:
    """Return the history of a repository, bare or with a work tree. Raises `ConfigError`."""
    if not repository.is_dir():
        raise ConfigError(f"{repository}: there is no such directory; clone the repository, and name the clone")
    try:
        git_dir = Path(_git(repository, "rev-parse", "--absolute-git-dir").strip())
    except CurationError as error:
        raise ConfigError(f"{repository}: no git history here: {error}") from error
    head = options.get("head", "HEAD")
    try:
        _git(git_dir, "rev-parse", "--verify", "--end-of-options", f"{head}^{{commit}}")
    except CurationError as error:
        raise ConfigError(f"--head={head}: names no commit of {repository}, which may have none yet") from error
    if name is None:
        with suppress(CurationError):
            name = _git(git_dir, "config", "remote.origin.url").strip()
    found = re.search(
        r"([\w.-]+)[/:]([\w.-]+?)(\.git)?/?$", name or f"{repository.resolve().name}/{repository.resolve().name}"
    )
    if found is None:
        raise ConfigError(f"--name={name}: expected OWNER/NAME")
    return History(git_dir=git_dir, name=f"{found[1]}/{found[2]}", **options)


def commits(history: History) -> Iterator[Commit]:
    """Yield the commits of the first-parent history, the newest first."""
    begin, between = uuid.uuid4().hex, uuid.uuid4().hex  # no message has these
    form = f"--format={begin}{between.join(('%H', '%P', '%cI', '%B', ''))}"
    since = [f"--since={history.since.isoformat()}"] if history.since else []
    listing = ["log", "--first-parent", "--diff-merges=first-parent", "--no-renames", "--name-only", "-z", form, *since]
    for record in _git(history.git_dir, *listing, "--end-of-options", history.head).split(begin)[1:]:
        sha, parents, when, message, names = record.split(between)
        yield Commit(
            sha=sha,
            parent=parents.partition(" ")[0],
            when=datetime.fromisoformat(when),
            message=message,
            files=[name.strip() for name in names.split("\0") if name.strip()],
        )


def journal(out: Path) -> Path:
    """Return the path of the journal of a file of tasks."""
    return out.with_suffix(".tried.jsonl")


def tried(out: Path, options: str) -> dict[str, Tried]:
    """Return commit -> its result, of all candidates that became tasks of a file, or fell with the same options.

    Raises `ConfigError` naming a line that does not hold a result.
    """
    path, known = journal(out), dict[str, Tried]()
    if not path.exists():
        return known
    with path.open("rb") as lines:
        for place, row in json_lines(lines, path):
            try:
                each = Tried(**row)
            except TypeError as error:
                raise ConfigError(f"{place}: not a line of this version's journal: {error}; move the file") from error
            if each.task or each.options == options:
                known[each.commit] = each
    return known


async def try_commit(history: History, commit: Commit, bench: Bench, out: Path, say: Say) -> Tried:
    """Make a task of a commit, add it to the JSONL file `out`, and write a line of the journal. Return that.

    Raises `ConfigError`, without a line, where the machine is at fault.
    """
    step = "reading the trees"

    def on_step(text: str) -> None:
        nonlocal step
        step = text
        say(text)

    instance_id = f"{history.name.replace('/', '__')}-{commit.sha[:12]}"
    if instance_id in instance_ids(out):  # the line of the journal was not written any more
        result = Tried(commit=commit.sha, task=instance_id)
    else:
        try:
            task = await _make(history, commit, instance_id, bench, out, on_step)
            result = Tried(commit=commit.sha, task=task.instance_id)
        except (CurationError, *GRADING_ERRORS) as error:
            why = str(error).removeprefix(f"{instance_id}: ") or "timed out"
            result = Tried(commit=commit.sha, fell=step, why=why, options=history.options)
            if isinstance(error, UntriedError) or not isinstance(error, CurationError):
                await _check_machine(bench, result)
        except (OSError, MachineError) as error:
            raise _stopped(commit.sha, step, str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    append_line(journal(out), asdict(result))
    return result


async def _check_machine(bench: Bench, result: Tried) -> None:
    """Raise `ConfigError` where the machine gives no sandbox, so that the candidate is not at fault.

    A sandbox that was lost on a machine that gives others counts as the candidate's fault: its tests may use up all
    memory, every time.
    """
    try:
        await bench.try_sandbox()
    except (*GRADING_ERRORS, OSError) as error:
        raise _stopped(result.commit, result.fell, str(error) or result.why) from error


def _stopped(commit: str, step: str, why: str) -> ConfigError:
    return ConfigError(
        f"the search stopped at {commit[:12]}, {step}: {why}; this machine is at fault, not the commit: put it right, "
        "and the same command goes on with this commit"
    )


async def _make(history: History, commit: Commit, instance_id: str, bench: Bench, out: Path, say: Say) -> Task:
    with tempfile.TemporaryDirectory(prefix="polar-gym-git-") as scratch:
        say("reading the trees")
        old, new = Path(scratch, "old"), Path(scratch, "new")
        for sha, tree in ((commit.parent, old), (commit.sha, new)):
            await asyncio.to_thread(_write_tree, history.git_dir, sha, tree)
        await asyncio.to_thread(_build, history, commit, old, new)

        async def instruct(comparison: Comparison, failing: Mapping[str, str]) -> tuple[str, str]:
            sources = (history.issues, history.writer)
            return await write_statement(commit.message, old, new, comparison, failing, *sources)

        trees = Trees(
            instance_id=instance_id,
            repo=history.name,
            old=old,
            new=new,
            needs=lambda: {**_needs(history, commit, new, bench.cache), "commit": commit.sha},
            instruct=instruct,
        )
        return await make_task(trees, bench, out, say, refuse_leaks=True)


def _write_tree(git_dir: Path, sha: str, tree: Path) -> None:
    """Write all files of a commit: `git archive` would leave out those that `export-ignore` names, as tests often."""
    tree.mkdir()
    index = {"GIT_INDEX_FILE": str(tree.with_suffix(".index"))}
    _git(git_dir, "read-tree", sha, more=index)
    _git(tree, f"--git-dir={git_dir}", f"--work-tree={tree}", "checkout-index", "--all", more=index)


def _build(history: History, commit: Commit, old: Path, new: Path) -> None:
    """Write the package's metadata, and the file with its version, which a build would write, and no change holds."""
    name = package_name(old) or history.name.rpartition("/")[2]
    try:
        tag = _git(history.git_dir, "describe", "--tags", "--abbrev=0", commit.parent)
    except CurationError:  # no tag before this commit
        tag = ""
    found = re.search(r"\d+(\.\d+)+", tag)
    version = found[0] if found else "0"
    make_known(old, name, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = version_file(old)
    for tree in (old, new):
        if path is not None and (tree / path).parent.is_dir() and not (tree / path).exists():
            try:
                confined(tree / path, [tree])
            except ValueError as error:  # a link that leads elsewhere
                raise CurationError(f"{path}: {error}") from error
            (tree / path).write_text(f"__version__ = version = {version!r}\n")


def _needs(history: History, commit: Commit, new: Path, cache: Path) -> dict[str, Any]:
    """Return what the tests need, pinned at the commit's date, and that date; else at today's, and "today".

    A requirement that has no wheel is left out: the tests show whether they need it.
    """
    wanted = [*requirements(new, python_version()), *history.extra_requirements]
    try:
        (pins, left_out), when = resolve_available(wanted, cache, before=commit.when), commit.when.date().isoformat()
    except CurationError:  # no wheels of that time for this Python, or an index that tells no dates
        (pins, left_out), when = resolve_available(wanted, cache), "today"
    own = canonicalize_name(package_name(new) or history.name.rpartition("/")[2])
    if any(canonicalize_name(pin.partition("==")[0]) == own for pin in pins):
        raise CurationError(f"what the tests need, needs {own} itself: its release would be tested, not these sources")
    return {"python_requirements": pins, "requirements_of": when, "requirements_left_out": left_out}


def _git(directory: Path, *arguments: str, more: Mapping[str, str] | None = None) -> str:
    """Run git on a repository. Raises `CurationError`."""
    return run_git(directory, *arguments, more=more).decode(errors="replace")
