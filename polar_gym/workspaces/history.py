"""The git repository that a task's image brings along: its history ends at the base commit.

An image is often built from a full clone, in which `git log --all` shows the fix of the bug. The fix may be a later
commit, or stand on a branch, under a tag, in the reflog, the stash or another worktree. It may also be an object that
nothing names any more. So before anything else runs in a sandbox, the repository is replaced by one that holds the
commit at HEAD and its ancestors, and the tags of these, from which packages make their version. They are fetched into a
new repository, which therefore never held anything else: git fetches by itself the tags of the commits that it fetches,
and no others. The files of the workspace stay as they are. A workspace is refused that is below a
repository, or has its history in a repository elsewhere (a linked worktree, an alternate object store): the history
there would stay.

A submodule's own repository has a history too, and goes. Its files become plain files of the workspace, whose changes
are in the diff. For git, the directory is then a submodule that is not initialized.

Where a bug is to be planted, the image does not have the base commit, and it is made first. This commit has no parent:
the diff to a parent would be the solution. The image's bytecode goes: it was compiled from the right source, and from
the hidden tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar_gym.runtimes import Command, Sandbox, SandboxError
from polar_gym.schema import Workspace
from polar_gym.workspaces.diff import FUNCTIONS

SECONDS = 300.0
MAX_BASELINE = 256 * 1024 * 1024

_CUT = r"""
set -e
cd "$1"
above=$(pwd -P)
while [ -n "$above" ]; do
    above=${above%/*}
    [ ! -e "$above/.git" ] || {
        echo "the repository ${above:-/} holds it, and would show its future; remove $above/.git from the image" \
            "${above:+or set runtime.workspace.path=$above}" >&2
        exit 1
    }
done
[ -e .git ] || [ -L .git ] || exit 0
[ -d .git ] && [ ! -L .git ] && [ ! -e .git/commondir ] && [ ! -L .git/objects ] &&
    [ ! -e .git/objects/info/alternates ] || {
    echo "its .git names a repository elsewhere, which would show its future; put a clone of its own" \
        "(git clone --no-local) in the place of $1 in the image, and remove that repository" >&2
    exit 1
}
new=$(mktemp -d /tmp/.history-XXXXXXXX)
here() { git -c safe.directory='*' --git-dir="$new" "$@"; }
here init -q --bare --template=
here config core.bare false
here config core.logAllRefUpdates false
here symbolic-ref HEAD refs/heads/main
fetch() { here fetch -q "$@" --no-recurse-submodules --update-shallow --update-head-ok \
    --upload-pack "git -c safe.directory='*' upload-pack" "$PWD" HEAD:refs/heads/main; }
fetch 2> /dev/null || fetch --no-tags  # a tag may name an object that is gone
rm -f "$new/FETCH_HEAD"
mkdir -p "$new/info"
[ ! -f .git/info/exclude ] || cp .git/info/exclude "$new/info/exclude"
rm -rf .git
mv "$new" .git
# Remove the rest of submodules' repositories: files that name a directory in the old `.git`, or whole repositories.
find . -path ./.git -prune -o -name .git -type f -exec rm -f {} + || true  # an unreadable directory
git -c safe.directory='*' -c core.quotePath=false ls-tree -r HEAD | sed -n 's/^160000 [^\t]*\t//p' |
    while IFS= read -r submodule; do
        [ ! -d "$submodule" ] || find "./$submodule" -name .git -prune -exec rm -rf {} +
    done
git -c safe.directory='*' read-tree HEAD
git -c safe.directory='*' update-index -q --refresh || true
"""

_BEGIN = r"""
set -e
cd "$1"
shift
[ -e .git ] || { echo 'holds no git repository' >&2; exit 1; }
git() { command git -c safe.directory='*' -c user.name=polar-gym -c user.email=polar-gym@localhost "$@"; }
"""

_COMMIT = r"""
git update-ref HEAD "$(git commit-tree "$(git write-tree)" -m 'Initial commit')"
"""
"""Makes a commit of the index that has no parent."""

_PLANT = rf"""
{_BEGIN}
patch=$(mktemp /tmp/.patch-XXXXXXXX)
trap 'rm -f "$patch"' EXIT
cat > "$patch"
git ls-files -z --others -- '*.py[co]' ':(glob)**/__pycache__/**' | xargs -0 rm -rf --
[ ! -s "$patch" ] || git apply --whitespace=nowarn "$patch"
[ $# = 0 ] || rm -f -- "$@"
git add -A
{_COMMIT}
"""

_FORGET = rf"""
{_BEGIN}
rm -f -- "$@"
git update-index --force-remove -- "$@"
{_COMMIT}
"""

_BASELINE = r"""
set -e
cd "$1"
base=$(mktemp -d /tmp/.baseline-XXXXXXXX)
trap 'rm -rf "$base"' EXIT
there() { git -c safe.directory='*' -c user.name=polar-gym -c user.email=polar-gym@localhost \
    -c core.protectNTFS=false -c core.protectHFS=false -c gc.auto=0 -c maintenance.auto=false \
    --git-dir="$base" --work-tree="$PWD" "$@"; }  # git's upkeep would change the repository while tar reads it
git init -q --bare --template= "$base"
hidden=.git-$(basename "$base")
make_readable  # as the diff will: the files of an unreadable directory are not the agent's
hide_nested /dev/null
new() {  # the index gets the files that are not ignored; options: of another work tree
    there "$@" ls-files -z --others --exclude="$hidden*" --exclude-standard > "$base/new" &&
        there "$@" update-index --add -z --stdin < "$base/new"
}
if [ -e .git ]; then
    there fetch -q --no-tags --depth 1 --upload-pack "git -c safe.directory='*' upload-pack" \
        "file://$PWD/.git" HEAD:refs/heads/main
    there symbolic-ref HEAD refs/heads/main
    there read-tree HEAD
    # The files of a submodule are those that its own `.gitignore` leaves: the workspace's may name some of them.
    there -c core.quotePath=false ls-files -s | sed -n 's/^160000 [^\t]*\t//p' | while IFS= read -r submodule; do
        there update-index --force-remove -- "$submodule"
        [ -d "$submodule" ] || continue
        files=$(export GIT_INDEX_FILE="$base/alone"; new --work-tree="$PWD/$submodule" && there write-tree)
        there read-tree --prefix="$submodule/" "$files"
        rm -f "$base/alone"
    done
fi
there add -u
new
there commit -q --allow-empty -m 'The workspace as the image has it'
# The agent may change `.gitignore`. The files that are ignored now are then not new, though no commit has them.
there ls-files -z --others --exclude="$hidden*" > "$base/ignored"
show_nested
there config core.bare false
tar -c -C "$base" .
"""


async def set_base(sandbox: Sandbox, workspace: Workspace, *, for_agent: bool) -> None:
    """Make the image's repository hold the base commit and its ancestors only. Raises `SandboxError`."""
    hidden = workspace.hidden_files if for_agent else []
    if workspace.base_patch or hidden:
        problem = "base_patch, hidden_files: the base commit cannot be made"
        await _run(sandbox, _PLANT, workspace.path, problem, *hidden, stdin=workspace.base_patch.encode())
    await cut_history(sandbox, workspace.path)


async def forget(sandbox: Sandbox, workspace_path: str, files: Sequence[str]) -> None:
    """Remove files from the workspace and from its git history, whose base commit is made anew without a parent.
    Raises `SandboxError`."""
    await _run(sandbox, _FORGET, workspace_path, "its git history keeps the hidden tests", *files)
    await cut_history(sandbox, workspace_path)


async def cut_history(sandbox: Sandbox, workspace_path: str) -> None:
    """Remove all of the workspace's git history, except HEAD, its ancestors and their tags. Raises `SandboxError`."""
    await _run(sandbox, _CUT, workspace_path, "its git history cannot be cut")


async def pack_baseline(sandbox: Sandbox, workspace_path: str) -> bytes:
    """Return the tar of a repository whose one commit is the workspace as it is now, for `diff.snapshot_diff`.

    Raises `SandboxError`.
    """
    return await _run(sandbox, FUNCTIONS + _BASELINE, workspace_path, "its content cannot be recorded")


async def _run(
    sandbox: Sandbox, script: str, workspace_path: str, problem: str, *arguments: str, stdin: bytes = b""
) -> bytes:
    command = Command(
        argv=["sh", "-c", script, "sh", workspace_path, *arguments],
        stdin=stdin,
        environment={"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"},
        workdir="/",
        timeout_seconds=SECONDS,
        output_limit=2 * MAX_BASELINE,
    )
    result = await sandbox.exec(command)
    if result.exit_code != 0 or len(result.stdout) > MAX_BASELINE:
        reason = result.stderr.decode(errors="replace").strip()[-2000:]
        if result.exit_code == 0:
            reason = f"more than {MAX_BASELINE} bytes"
        raise SandboxError(f"{workspace_path} in the image: {problem}: {reason or 'it took too long'}")
    return result.stdout
