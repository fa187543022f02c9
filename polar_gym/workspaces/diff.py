"""The changes of an agent as a git patch, and their way into another sandbox.

The agent owns its workspace's `.git` and its home: it may commit, add hooks and filters, or delete all of it. So the
diff is taken by a repository of our own, which was packed before the agent started. Its index is read again, no
configuration of the agent applies, and the base commit's `.gitattributes` say what a file's content is. Some things
make `git add` give up, and are put right first: unreadable files, things that are neither file nor link, links named
`.gitmodules`, and names that git refuses. So are repositories inside the workspace, which git would record as links to
nowhere.

The diff carries the content, mode and deletion of every file in the workspace, and symbolic links as links. It does not
carry empty directories, files that the workspace's `.gitignore` names (unless the base commit has them), and the
content of a submodule that the base commit has; that of `history.pack_baseline` has plain files in the place of
submodules and of other repositories in the workspace, and names the files that were ignored before the agent. These
stay ignored, and are not read, whatever the agent writes into a `.gitignore`. Nor does the diff carry the files that
running Python leaves (bytecode, pytest's cache), and everything outside of the workspace. `left_behind` lists the files
of these that may be the agent's work.

Where no diff can be taken, that is the agent's doing: the same steps work on the workspace as it was before the agent.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from polar_gym.runtimes import Command, Sandbox, SandboxError, agent

LEFT_BEHIND = 50
"""The number of files that `left_behind` names at most."""

_ATTRIBUTES = re.compile(rb"^diff --git [^\n]*/\.gitattributes\"?\n.*?(?=^diff --git |\Z)", re.MULTILINE | re.DOTALL)
_REMOVED_LINKS = re.compile(
    rb"^diff --git [^\n]*\ndeleted file mode 120000\n.*?(?=^diff --git |\Z)", re.MULTILINE | re.DOTALL
)
_UNQUOTED = re.compile(rb'^diff --git (a/[^\n"]*)$', re.MULTILINE)
_MADE = re.compile(rb'^diff --git ("?)a/([^\n]*)\1 \1b/\2\1\nnew file mode ', re.MULTILINE)

MAX_DIFF = 64 * 1024 * 1024
DIFF_SECONDS = 300.0

_NO_CONFIGURATION = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "XDG_CONFIG_HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "PATH": agent.PATH,  # never a directory of the agent's
}

_ANY_NAME = ("-c", "core.protectNTFS=false", "-c", "core.protectHFS=false")
"""Options for names that only other systems confuse with `.git`: here they are names like any other."""

FUNCTIONS = r"""
make_readable() {
    find . -type d ! -perm -700 -exec chmod u+rwx {} \;
    find . -type f ! -perm -400 -exec chmod u+r {} +
}
hide_nested() {  # make nested repositories look like plain directories, except in those that the file $1 lists
    find . -path ./.git -prune -o -iname .git -prune -exec sh -c '
        submodules=$1 hidden=$2; shift 2
        for nested; do
            directory=${nested%/*}
            grep -qxF -e "${directory#./}" "$submodules" || mv "$nested" "$directory/$hidden${nested##*/}"
        done' sh "$1" "$hidden" {} +
}
show_nested() {
    find . -name "$hidden.*" -prune -exec sh -c '
        hidden=$1; shift
        for nested; do
            name=${nested##*/}
            mv "$nested" "${nested%/*}/${name#"$hidden"}"
        done' sh "$hidden" {} +
}
"""
"""Shell functions for the files below the working directory: they make all of these readable, rename the `.git` of
nested repositories, and rename it back. The variable `hidden` is the beginning of the other names."""

_SNAPSHOT = r"""
set -e
export HOME=/nonexistent  # git before 2.32 does not know GIT_CONFIG_GLOBAL, and reads the agent's ~/.gitconfig
work=$1
any_name=$2
for program in git tar find sed grep mktemp xargs; do
    command -v "$program" > /dev/null || { echo "$program is missing in the image" >&2; exit 90; }
done
private=$(mktemp -d /tmp/.snapshot-XXXXXXXX)
hidden=.git-$(basename "$private")
trap 'rm -rf "$private"' EXIT
tar -x -o -f - -C "$private"
repository() {
    git --git-dir="$private" --work-tree="$work" -c safe.directory='*' -c core.fsmonitor=false \
        -c core.hooksPath=/dev/null -c core.untrackedCache=false -c core.splitIndex=false -c core.fileMode=true \
        $any_name "$@"
}
cd "$work"
make_readable
find . ! -type d ! -type f ! -type l -exec rm -f {} +
find . -type l -iname .gitmodules -exec rm -f {} +
repository read-tree HEAD
# Make a nested repository that the base commit does not know look like a plain directory.
repository ls-files -s | sed -n 's/^160000 [^\t]*\t//p' > "$private/submodules"
hide_nested "$private/submodules"
# No `.gitignore` takes in files that options exclude, as it could those that `info/exclude` names.
set -- --exclude="$hidden*" --exclude=__pycache__/ --exclude='*.py[cod]' --exclude=.pytest_cache/ --exclude-standard
# While files are added, the attributes are those of the base commit; those of the agent are files like any other.
attributes() { find . -path ./.git -prune -o -name "$1" ! -type d -exec sh -c '
    to=$1; shift
    for each; do mv "$each" "${each%/*}/$to"; done' sh "$2" {} +; }
attributes .gitattributes "${hidden}attributes"
# Where the agent put a file or a link in the place of a directory, git would remove it to write the directory's.
repository ls-files -z -- ':(glob)**/.gitattributes' | xargs -0 -r sh -c '
    root=$(pwd -P)
    for each; do
        directory=./$each; directory=${directory%/*}
        [ "$(cd "$directory" 2> /dev/null && pwd -P)" != "$root${directory#.}" ] || printf "%s\0" "$each"
    done' sh > "$private/attributes"
repository checkout-index -f -q -z --stdin < "$private/attributes"
# Files that `history.pack_baseline` found to be ignored are in the index here: git does not read them, and they are not
# new files where the agent's `.gitignore` takes them in.
if [ -s "$private/ignored" ]; then
    empty=$(repository hash-object -w --stdin < /dev/null)
    xargs -0 printf "100644 $empty\t%s\0" < "$private/ignored" | repository update-index -z --index-info
    repository update-index --assume-unchanged -z --stdin < "$private/ignored"
fi
repository add -u
repository ls-files -z --others "$@" > "$private/new"
repository update-index --add --replace -z --stdin < "$private/new"
(xargs -0 -r rm -f --) < "$private/attributes"
attributes "${hidden}attributes" .gitattributes
forget_ignored() {
    [ ! -e "$private/ignored" ] || repository update-index --force-remove -z --stdin < "$private/ignored"
}
forget_ignored  # the attributes among them may be beyond a link now
repository ls-files -z --cached --others "$@" -- ':(glob)**/.gitattributes' > "$private/attributes"
repository update-index --add --remove --replace -z --stdin < "$private/attributes"
forget_ignored
show_nested
repository diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames \
    --src-prefix=a/ --dst-prefix=b/ HEAD
"""


class UnreadableWorkspaceError(Exception):
    """The agent left a workspace whose diff cannot be taken, or is too long: the episode is scored, not masked."""


async def snapshot_diff(sandbox: Sandbox, workspace_path: str, git_dir_archive: bytes) -> bytes:
    """Return the diff from the base commit to the workspace, with new files and without ignored ones.

    `git_dir_archive` is the tar (`files.pack`) of the workspace's `.git` from before the agent. Raises `SandboxError`
    where the sandbox fails. Raises `UnreadableWorkspaceError` where the workspace cannot be read, and for a diff that
    is longer than 64 MiB.
    """
    result = await sandbox.exec(
        Command(
            argv=["sh", "-c", FUNCTIONS + _SNAPSHOT, "sh", workspace_path, " ".join(_ANY_NAME)],
            environment=_NO_CONFIGURATION,
            workdir="/",
            stdin=git_dir_archive,
            timeout_seconds=DIFF_SECONDS,
            output_limit=2 * MAX_DIFF,
        )
    )
    reason = result.stderr.decode(errors="replace").strip()[-2000:]
    if result.exit_code == 90:
        raise SandboxError(f"the diff of {workspace_path} cannot be taken: {reason}")
    if result.timed_out:
        raise UnreadableWorkspaceError(f"the diff of {workspace_path} took more than {DIFF_SECONDS:.0f} s")
    if result.exit_code != 0:
        raise UnreadableWorkspaceError(
            f"the diff of {workspace_path} failed with exit code {result.exit_code}: {reason}"
        )
    if len(result.stdout) > MAX_DIFF:
        raise UnreadableWorkspaceError(f"the diff of {workspace_path} is longer than {MAX_DIFF} bytes")
    return result.stdout


_LEFT_BEHIND = r"""
cd "$1" && {
    find . ! -type d ! -type f ! -type l -exec rm -f {} +
    HOME=/nonexistent timeout -s KILL 10 git -c safe.directory='*' -c core.fsmonitor=false -c core.quotePath=false \
        ls-files --others --ignored --directory --exclude-per-directory=.gitignore 2> /dev/null |
        grep -v -e '__pycache__/$' -e '\.py[cod]$' -e '^\.pytest_cache/$'
}
for directory in "$HOME" "${TMPDIR:-/tmp}"; do
    find "$directory" -mindepth 1 -path '*/.*' -prune -o -type f -print 2> /dev/null
done
"""


async def left_behind(sandbox: Sandbox, workspace_path: str) -> list[str]:
    """Return the names of files that no diff carries, though they may be the agent's work; at most `LEFT_BEHIND`.

    These are ignored files (relative names), and files in the agent's home and in /tmp (absolute names), without hidden
    ones. The names are for a person to read. git reads the agent's own `.git`, which may lead it to a pipe that nothing
    is written to: things that are neither file nor link are removed first, and git has ten seconds.
    """
    command = f"({_LEFT_BEHIND}) | head -n {LEFT_BEHIND}"
    argv = ["sh", "-c", command, "sh", workspace_path]
    result = await sandbox.exec(Command(argv=argv, environment=_NO_CONFIGURATION, workdir="/"))
    return result.stdout.decode(errors="replace").splitlines()


_APPLY = r"""
make_readable  # as the snapshot does: git writes into no directory that the image has locked
patch=$(mktemp /tmp/.patch-XXXXXXXX) && trap 'rm -f "$patch"' EXIT && cat > "$patch" || exit 90
git "$@" apply --numstat -z "$patch" || exit
export submodules=
! grep -q " 160000$" "$patch" || submodules=yes  # their directories stay
# The ignored files and the empty directories in a directory that becomes a file or a link are not in the diff, and
# would keep the directory. So would an ignored file or link keep a directory from being made.
[ ! -e .git ] || git "$@" apply --numstat -z "$patch" | xargs -0 -r sh -c '
    tab=$(printf "\t")
    for counted; do
        path=${counted#*"$tab"*"$tab"}
        if [ ! -L "./$path" ] && [ -d "./$path" ]; then
            git -c safe.directory="*" clean -q -ffdX -- ":(literal)$path"
            [ -n "$submodules" ] || find "./$path" -depth -type d -exec rmdir {} + 2> /dev/null || :
        fi
        while [ "$path" != "${path%/*}" ]; do
            path=${path%/*}
            { [ -L "./$path" ] || [ -f "./$path" ]; } && git -c safe.directory="*" clean -q -ffX -- ":(literal)$path"
        done
    done' sh >&2
git "$@" apply --binary --whitespace=nowarn "$patch"
"""
"""Applies a patch, and prints the files that git finds in it, as `git apply --numstat -z` does."""


async def apply_diff(sandbox: Sandbox, workspace_path: str, diff: bytes) -> set[bytes]:
    """Apply a patch to a workspace, and return the paths of the files that git found in the patch.

    An empty patch changes nothing. Raises `ValueError` where the patch does not apply.
    """
    diff = _UNQUOTED.sub(_quoted, diff)
    links = b"".join(_REMOVED_LINKS.findall(diff))
    others = _REMOVED_LINKS.sub(b"", diff) if links else diff
    found = _ATTRIBUTES.findall(others) if b"/.gitattributes" in others else []
    made = {each[2] for each in _MADE.finditer(others)} if found else set()
    attributes = b"".join(each for each in found if not _makes_room(each, made))
    if attributes:
        others = _ATTRIBUTES.sub(lambda each: each[0] if _makes_room(each[0], made) else b"", others)
    # git finds no place for a directory where a link leads to itself, also where the diff removes the link: those go
    # first. `.gitattributes` come last: they would change how the content of other files is written.
    parts = [part for part in (links, others, attributes) if part.strip()]
    return {path for part in parts for path in await _apply(sandbox, workspace_path, part)}


def _quoted(header: re.Match[bytes]) -> bytes:
    """Return a header with quotes where a directory's name ends with a blank: git writes such a header without quotes,
    and does not read it where the file is empty or binary."""
    half = len(header[1]) // 2  # both names have one length, with a blank between
    old, new = header[1][:half], header[1][half + 1 :]
    if b" /" not in old or old[2:] != new[2:]:
        return header[0]
    return b'diff --git "' + old + b'" "' + new + b'"'


def _makes_room(section: bytes, made: Collection[bytes]) -> bool:
    """Return whether a section removes the `.gitattributes` of a directory that becomes a file or a link. `made`: the
    paths of the new ones, as git quotes them."""
    header = section.partition(b"\n")[0].removeprefix(b"diff --git ").removeprefix(b'"').removeprefix(b"a/")
    parts = header.partition(b"/.gitattributes")[0].split(b"/")
    above = (b"/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return b"\ndeleted file mode " in section and any(each in made for each in above)


async def _apply(sandbox: Sandbox, workspace_path: str, diff: bytes) -> list[bytes]:
    result = await sandbox.exec(
        Command(
            argv=["sh", "-c", FUNCTIONS + _APPLY, "sh", *_ANY_NAME, "-c", "safe.directory=*"],
            # In a repository further up, git would skip all paths, and succeed.
            environment={**_NO_CONFIGURATION, "GIT_CEILING_DIRECTORIES": str(PurePosixPath(workspace_path).parent)},
            workdir=workspace_path,
            stdin=diff,
            timeout_seconds=DIFF_SECONDS,
            output_limit=MAX_DIFF,
        )
    )
    if result.timed_out:
        raise SandboxError(f"a diff took more than {DIFF_SECONDS:.0f} s to apply to {workspace_path}")
    reason = result.stderr.decode(errors="replace").strip()
    if result.exit_code == 90:
        raise SandboxError(f"a diff cannot be written for {workspace_path}: {reason}")
    if result.exit_code != 0:
        raise ValueError(f"the diff does not apply to {workspace_path}: {reason}")
    return [line.split(b"\t", 2)[2] for line in result.stdout.split(b"\0") if line]
