"""Makes the git repository that an agent works in from a task's files.

A task names its files as a plain directory or as a git repository. Either way the sandbox gets a repository of its own
whose history ends at the base commit: no remotes, no tags, no other branches, no reflog, nothing unreachable. So an
agent cannot dig the fix of a real bug out of `.git`. For a plain directory the one commit is deterministic: its sha
depends only on the files' content and modes, never on the machine, the user or the user's git configuration.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

_AUTHOR = "polar-gym"
_EMAIL = "polar-gym@localhost"
_DATE = "@1704067200 +0000"
_NOT_SOURCE = ("__pycache__", "*.pyc", ".git")
"""Names that are left out of plain directories: files that Python and installers make, and nested repositories."""
_TIMEOUT_SECONDS = 600


class WorkspaceError(Exception):
    """A workspace could not be made. The message names the directory, and quotes git."""


def make_repository(source: Path, destination: Path) -> str:
    """Make the git repository `destination` (which must not exist) from `source`; return the sha of its base commit.

    All files of a plain directory are committed, also ignored ones. From a git repository, the commit at HEAD and its
    history are taken, without uncommitted changes.
    """
    if not source.is_dir():
        raise WorkspaceError(f"workspace source {source} is not a directory")
    if (source / ".git").exists():
        _init(destination)
        upload_pack = "git -c safe.directory='*' upload-pack --strict"  # else it also looks for one at `source.git`
        fetch = ("fetch", "--quiet", "--no-tags", "--update-shallow", "--update-head-ok", "--no-write-fetch-head")
        _git(destination, *fetch, "--upload-pack", upload_pack, str(source.resolve() / ".git"), "HEAD:refs/heads/main")
        _git(destination, "reset", "--quiet", "--hard")
    else:
        shutil.copytree(source, destination, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
        _init(destination)
        _git(destination, "add", "--all", "--force")
        _git(destination, "commit", "--quiet", "--allow-empty", "--message", "Base commit")
    return _git(destination, "rev-parse", "HEAD").strip()


def not_at_head(source: Path) -> list[str]:
    """Return the files and directories of a git repository that `make_repository` leaves out: uncommitted changes and
    submodules, without ignored files. None of a plain directory. Raises `WorkspaceError`."""
    if not (source / ".git").exists():
        return []
    git = ("-c", "safe.directory=*", "--no-optional-locks")
    status = _git(source, *git, "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=all", ".")
    entries = _git(source, *git, "ls-tree", "-r", "-z", "--full-tree", "HEAD").split("\0")
    submodules = [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]
    return [*(line[3:] for line in status.split("\0") if line), *submodules]


def pack_git_dir(repository: Path) -> bytes:
    """Return the content of `.git` as an uncompressed tar.

    A later diff is made against this tar, whatever the agent does to its own `.git`.
    """
    git_dir = repository / ".git"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(git_dir.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(git_dir)), recursive=False, filter=_anonymous)
    return buffer.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _init(destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    _git(destination, "init", "--quiet", "--template=", "--initial-branch=main", "--object-format=sha1")
    _git(destination, "config", "core.logAllRefUpdates", "false")


def _git(repository: Path, *arguments: str) -> str:
    """Run git with the repository's own configuration only; return its output. Raises `WorkspaceError`."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(repository.parent),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": _AUTHOR,
        "GIT_AUTHOR_EMAIL": _EMAIL,
        "GIT_AUTHOR_DATE": _DATE,
        "GIT_COMMITTER_NAME": _AUTHOR,
        "GIT_COMMITTER_EMAIL": _EMAIL,
        "GIT_COMMITTER_DATE": _DATE,
    }
    command = ["git", "-c", "gc.auto=0", *arguments]  # it would go on in the background, and change the repository
    try:
        done = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise WorkspaceError("git is missing; install it with: apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise WorkspaceError(f"{' '.join(command)} in {repository} took over {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise WorkspaceError(f"{' '.join(command)} in {repository} failed: {message}")
    return done.stdout.decode(errors="backslashreplace")
