"""An image's git repository loses its future before the agent sees it."""

import re
import subprocess
from pathlib import Path

import pytest

from polar_gym.runtimes import SandboxError
from polar_gym.schema import Workspace
from polar_gym.workspaces import diff as diff_module
from polar_gym.workspaces.diff import apply_diff, snapshot_diff
from polar_gym.workspaces.history import cut_history, forget, pack_baseline, set_base
from polar_gym.workspaces.repository import make_repository
from tests.lifecycle.runtime_kinds import make, sh, started
from tests.support.requirements import need_bubblewrap

CLONE = r"""
set -e
git init -q -b trunk . && git config user.name a && git config user.email a@a
commit() { echo "$1" > "$1"; git add -A; git commit -qm "$1"; }
commit before; git tag v1; printf 'ignored\n' > .gitignore; commit base; git tag -am 'version 2' v2
base=$(git rev-parse HEAD)
commit secret-fix; git tag secret-tag; git tag -am secret-message secret-annotated
git branch secret-branch; git update-ref refs/remotes/origin/trunk HEAD
git notes add -m secret-note
git reset -q --hard "$base"
git worktree add -q /tmp/secret-worktree secret-branch
echo secret-stash > before; git stash -q
commit secret-lost; git reset -q --hard "$base"; git gc -q; git pack-refs --all
git checkout -q --detach; echo changed > base; echo x > untracked; echo x > ignored
"""
FIXED = """
git init -q . && git config user.name a && git config user.email a@a
echo bug > m; git add m; git commit -qm base; echo right > m; git commit -qam secret-fix
"""
SUBMODULES = r"""
set -e
made() { git init -q "$1" && cd "$1" && git config user.name a && git config user.email a@a; }
add() { git -c protocol.file.allow=always submodule --quiet add "$@"; }
commit() { echo "$1" > "$1"; git add -A; git commit -qm "$1"; }
(made /tmp/deep; commit deep)
(made /tmp/lib; add /tmp/deep deep; commit old; commit secret-fix)
made /workspace; add /tmp/lib 'the lib'; add /tmp/lib empty; cd 'the lib'
git checkout -q HEAD~1; git -c protocol.file.allow=always submodule --quiet update --init; cd ..
echo old > .gitignore; commit base; git submodule --quiet deinit empty; rm -rf /tmp/deep /tmp/lib
"""
AS_OLD_GIT_HAS_THEM = """
cd 'the lib'; rm .git; mv '../.git/modules/the lib' .git; sed -i /worktree/d .git/config
cd deep; rm .git; mv ../.git/modules/deep .git; sed -i /worktree/d .git/config
"""
COMPILED = r"""
set -e
git init -q . && git config user.name a && git config user.email a@a
mkdir pkg tests data; printf 'def f(a):\n    return a + 12345\n' > pkg/m.py; echo 'SECRET = 1' > tests/test_m.py
echo x > data/kept.pyc; printf '*.py[co]\n__pycache__/\n' > .gitignore; git add -Af; git commit -qm base
python3 -c 'import compileall; compileall.compile_dir(".", quiet=1); compileall.compile_dir(".", quiet=1, legacy=True)'
echo x > pkg/__pycache__/m.f-2.py311.nbi
"""
BUG = """\
diff --git a/pkg/m.py b/pkg/m.py
--- a/pkg/m.py
+++ b/pkg/m.py
@@ -1,2 +1,2 @@
 def f(a):
-    return a + 12345
+    return a
"""
SECRETS = (
    "git rev-list --all --reflog --objects; git cat-file --batch-all-objects --batch --unordered;git fsck --unreachable"
)


@pytest.fixture
async def cloned():
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox:
        done = await sh(sandbox, CLONE)
        assert done.exit_code == 0, done.stderr.decode()
        assert b"secret" in (await sh(sandbox, SECRETS)).stdout
        yield sandbox


async def test_nothing_but_the_past_is_left(cloned):
    status = (await sh(cloned, "git status --porcelain; git rev-parse HEAD")).stdout
    await cut_history(cloned, "/workspace")
    left = (await sh(cloned, SECRETS)).stdout
    assert b"secret" not in left
    assert b"unreachable" not in left
    assert (await sh(cloned, "git log --format=%s")).stdout == b"base\nbefore\n"
    assert (await sh(cloned, "git status --porcelain; git rev-parse HEAD")).stdout == status
    assert (await sh(cloned, "git stash list; git reflog; git notes list; git remote")).stdout == b""
    assert b"secret" not in (await sh(cloned, "ls -R .git; cat .git/packed-refs")).stdout


ELSEWHERE = {
    "a linked worktree": "cd /tmp/main; git worktree add -q -f /workspace HEAD~1",
    "a git dir elsewhere": "git init -q --separate-git-dir /tmp/main/.git .; git checkout -q HEAD~1",
    "a link": "ln -s /tmp/main/.git .git",
    "linked objects": "cp -r /tmp/main/.git .; rm -r .git/objects; ln -s /tmp/main/.git/objects .git",
    "a shared clone": "git clone -q --shared /tmp/main /tmp/clone; mv /tmp/clone/.git .; git reset -q --hard HEAD~1",
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=ELSEWHERE)
async def test_workspace_whose_repository_is_elsewhere_is_refused(elsewhere: str):
    """Only the name of that repository was removed: the agent read the fix in it."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox:
        done = await sh(sandbox, f"set -e; mkdir /tmp/main; (cd /tmp/main; {FIXED}); {elsewhere}")
        assert done.exit_code == 0, done.stderr.decode()
        with pytest.raises(SandboxError, match=r"its \.git names a repository elsewhere.* in the place of /workspace"):
            await cut_history(sandbox, "/workspace")


async def test_a_planted_bug_leaves_nothing_compiled_from_the_right_source_or_the_hidden_tests():
    """The agent could read the solution out of `pkg/__pycache__`. What git knows stays, bytecode or not."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox:
        done = await sh(sandbox, COMPILED)
        assert done.exit_code == 0, done.stderr.decode()
        planted = Workspace(path="/workspace", base_patch=BUG, hidden_files=["tests/test_m.py"])
        await set_base(sandbox, planted, for_agent=True)
        left = await sh(
            sandbox, "find . -path ./.git -prune -o -type f -print | sort; cat pkg/m.py; git status --short"
        )
    assert left.stdout.decode() == "./.gitignore\n./data/kept.pyc\n./pkg/m.py\ndef f(a):\n    return a\n"


async def test_git_forgets_the_hidden_tests_of_an_image_before_they_are_graded():
    """Guards against tested code that reads in HEAD which of the copies of a test is right: only there, a test of
    SWE-smith stands without its twins."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox:
        assert (await sh(sandbox, COMPILED)).exit_code == 0
        workspace = Workspace(path="/workspace", base_patch=BUG, hidden_files=["tests/test_m.py"])
        await set_base(sandbox, workspace, for_agent=False)
        assert b"SECRET" in (await sh(sandbox, "git show HEAD:tests/test_m.py")).stdout
        await forget(sandbox, workspace.path, workspace.hidden_files)
        known = await sh(sandbox, "git cat-file --batch --batch-all-objects; git log --format=%s; git diff HEAD")
        assert b"a + 12345" not in known.stdout
        assert b"SECRET" not in known.stdout
        left = await sh(sandbox, "cat pkg/m.py; find tests -type f; git status --short")
    assert left.stdout.decode() == "def f(a):\n    return a\n"


async def test_tags_of_the_past_are_kept(cloned):
    """Packages that make their version from tags could not be installed again."""
    named = await sh(cloned, "git rev-parse HEAD HEAD~1 v2 secret-tag secret-annotated")
    base, before, annotated, *later = named.stdout.decode().split()
    await cut_history(cloned, "/workspace")
    assert (await sh(cloned, "git for-each-ref --format='%(refname) %(objectname)'")).stdout.decode().splitlines() == [
        f"refs/heads/main {base}",
        f"refs/tags/v1 {before}",
        f"refs/tags/v2 {annotated}",
    ]
    assert (await sh(cloned, "git describe --tags; git describe HEAD~1 --tags")).stdout == b"v2\nv1\n"
    assert [(await sh(cloned, f"git cat-file -e {each}")).exit_code for each in later] == [1, 1]


STALE = """
git -c user.name=a -c user.email=a@a tag -a gone -m gone
git pack-refs --all
object=$(git rev-parse gone)
rm -f ".git/objects/$(echo "$object" | cut -c 1-2)/$(echo "$object" | cut -c 3-)"
mkdir locked
chmod 0 locked
"""


async def test_image_with_a_broken_tag_and_a_locked_directory(cloned):
    """Both ended every start of a sandbox."""
    done = await sh(cloned, STALE)
    assert done.exit_code == 0, done.stderr.decode()
    await cut_history(cloned, "/workspace")
    assert (await sh(cloned, "git status --porcelain --untracked-files=no && git log --oneline")).exit_code == 0


async def test_diff_is_against_the_files_that_the_image_has(cloned):
    """Files that the image changed or added are not the agent's work, and once made its diff fail to apply."""
    await cut_history(cloned, "/workspace")
    git_dir = await pack_baseline(cloned, "/workspace")
    assert await snapshot_diff(cloned, "/workspace", git_dir) == b""
    await sh(cloned, "echo more >> untracked; git add -A; git -c user.name=a -c user.email=a@a commit -qm all")
    diff = await snapshot_diff(cloned, "/workspace", git_dir)
    assert diff.count(b"diff --git") == 1
    await sh(cloned, "git checkout -q HEAD~1; echo x > untracked; echo changed > base")
    await apply_diff(cloned, "/workspace", diff)
    assert (await sh(cloned, "cat untracked")).stdout == b"x\nmore\n"


async def test_git_does_not_pack_what_tar_reads():
    """Guards against sessions that failed because git moved objects in the background while they were read."""
    need_bubblewrap()
    async with started(make("bubblewrap"), environment={"GIT_TRACE": "/tmp/trace"}) as sandbox:
        assert (await sh(sandbox, f"unset GIT_TRACE; {FIXED}")).exit_code == 0
        await pack_baseline(sandbox, "/workspace")
        trace = (await sh(sandbox, "cat /tmp/trace")).stdout
    assert b" commit " in trace
    assert b"maintenance run" not in trace
    assert b"git gc" not in trace


@pytest.mark.parametrize("layout", ["", AS_OLD_GIT_HAS_THEM], ids=["file", "directory"])
async def test_image_with_filled_submodules(layout: str):
    """Its `.git` files named repositories that went with the old `.git`: git refused the workspace."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox, started(make("bubblewrap")) as fresh:
        for each in (sandbox, fresh):
            done = await sh(each, f"{SUBMODULES}{layout}")
            assert done.exit_code == 0, done.stderr.decode()
            await cut_history(each, "/workspace")
        assert (await sh(sandbox, "git status --porcelain && find . -name .git")).stdout == b"./.git\n"
        assert b"secret" not in (await sh(sandbox, "git cat-file --batch-all-objects --batch")).stdout
        git_dir = await pack_baseline(sandbox, "/workspace")
        assert await snapshot_diff(sandbox, "/workspace", git_dir) == b""
        await sh(sandbox, "cd 'the lib'; echo more >> old; echo new > deep/new; rm deep/deep; echo new > ../empty/new")
        await apply_diff(fresh, "/workspace", await snapshot_diff(sandbox, "/workspace", git_dir))
        assert (await sh(fresh, "cd 'the lib'; cat old; ls deep; ls ../empty")).stdout == b"old\nmore\nnew\nnew\n"


BUILT = r"""
set -e
git init -q . && git config user.name a && git config user.email a@a
printf '*uild*/\n*.o\nname[!s]*\n' > .gitignore; mkdir src '[b]uild *' objects
git init -q build/nested; echo out > build/nested/out; echo '*' > build/nested/.gitattributes
mkdir locked; echo out > locked/out; chmod 000 locked/out locked
mkdir 'linked uild'; echo '*.c text' > 'linked uild/.gitattributes'; echo 'linked uild' >> .gitignore
echo x > src/x.c; git add -A; git commit -qm base
echo out > '[b]uild */out'; echo out > src/x.o; echo out > objects/x.o; echo out > 'name '; echo out > 'name\?'
"""
IGNORES = {
    "its own": "echo '*.log' > .gitignore",
    "none": "rm .gitignore",
    "others that take in": r"printf '!*uild*/\n!*.o\n!name*\n' >> .gitignore",
    "all taken in": "echo '!*' > .gitignore",
    "its own, for a link": "echo 'linked uild' > .gitignore; rm -r 'linked uild'; ln -s /tmp 'linked uild'",
}
NEW = "src/new.c name objects/new.c locked/new.c"


@pytest.mark.parametrize("ignores", IGNORES.values(), ids=IGNORES)
async def test_files_that_the_image_ignores_are_not_the_agents_work(ignores: str):
    """Once the agent had changed `.gitignore`, they were new files of the diff, which no fresh sandbox took. So were
    those in a nested repository, and those in an unreadable directory, whatever the agent did."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox, started(make("bubblewrap")) as fresh:
        for each in (sandbox, fresh):
            done = await sh(each, BUILT)
            assert done.exit_code == 0, done.stderr.decode()
        git_dir = await pack_baseline(sandbox, "/workspace")
        assert await snapshot_diff(sandbox, "/workspace", git_dir) == b""
        await sh(sandbox, f"{ignores}; for each in {NEW} src/x.o '[b]uild */new'; do echo new > \"$each\"; done")
        diff = await snapshot_diff(sandbox, "/workspace", git_dir)
        await apply_diff(fresh, "/workspace", diff)
        both = f"cat {NEW} '[b]uild */new' src/x.o '[b]uild */out'"
        assert (await sh(fresh, both)).stdout == 5 * b"new\n" + 2 * b"out\n"
        left = "cat .gitignore 2>&1"
        assert (await sh(fresh, left)).stdout == (await sh(sandbox, left)).stdout


async def test_ignored_files_are_not_read_where_the_agent_takes_them_in(monkeypatch: pytest.MonkeyPatch):
    """The agent's diff took longer than it may where an image has gigabytes of them: the reward was 0."""
    need_bubblewrap()
    # 500 GB: to read them takes an hour.
    large = "mkdir build; cd build; truncate -s 500M x; for each in $(seq 1000); do ln x x$each; done"
    monkeypatch.setattr(diff_module, "DIFF_SECONDS", 60.0)
    async with started(make("bubblewrap")) as sandbox:
        done = await sh(sandbox, f"set -e; {FIXED} echo build/ > .gitignore; git add -A; git commit -qm next; {large}")
        assert done.exit_code == 0, done.stderr.decode()
        git_dir = await pack_baseline(sandbox, "/workspace")
        await sh(sandbox, "rm .gitignore; echo better > m; echo new > build/new")
        diff = await snapshot_diff(sandbox, "/workspace", git_dir)
    assert re.findall(rb"^diff --git a/(\S+)", diff, re.MULTILINE) == [b".gitignore", b"build/new", b"m"]


async def test_an_ignored_file_becomes_a_directory():
    """The fresh sandbox had the file, and the diff did not apply."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox, started(make("bubblewrap")) as fresh:
        for each in (sandbox, fresh):
            begun = "echo 'cache*' > .gitignore; git add -A; git commit -qm next; echo x > cache; ln -s /tmp cached"
            done = await sh(each, f"set -e; {FIXED} {begun}")
            assert done.exit_code == 0, done.stderr.decode()
        git_dir = await pack_baseline(sandbox, "/workspace")
        await sh(
            sandbox,
            "rm .gitignore cache cached; mkdir -p cache/d cached; touch cache/d/x cache/.gitattributes cached/y",
        )
        await apply_diff(fresh, "/workspace", await snapshot_diff(sandbox, "/workspace", git_dir))
        assert (await sh(fresh, "ls -A cache cached/; ls /tmp")).stdout.split() == [
            *(b"cache:", b".gitattributes", b"d", b"cached/:", b"y")
        ]


NESTED = {
    "a commit": "git add -A; git -c user.name=a -c user.email=a@a commit -qm nested",
    "no commit": "true",
}


@pytest.mark.parametrize("commit", NESTED.values(), ids=NESTED)
async def test_changes_in_a_repository_below_the_workspace_are_carried(commit: str):
    """They were lost: the base commit had the repository as a link. Without a commit, no session began."""
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox, started(make("bubblewrap")) as fresh:
        for each in (sandbox, fresh):
            done = await sh(each, f"set -e; {FIXED} git init -q nested; cd nested; echo old > x; {commit}; chmod 555 .")
            assert done.exit_code == 0, done.stderr.decode()
        git_dir = await pack_baseline(sandbox, "/workspace")
        assert (await sh(sandbox, "find . -name '.git*' | sort")).stdout == b"./.git\n./nested/.git\n"
        assert await snapshot_diff(sandbox, "/workspace", git_dir) == b""
        await sh(sandbox, f"cd nested; chmod 755 .; echo more >> x; echo new > y; {commit}")
        await apply_diff(fresh, "/workspace", await snapshot_diff(sandbox, "/workspace", git_dir))
        assert (await sh(fresh, "cat nested/x nested/y")).stdout == b"old\nmore\nnew\n"


@pytest.mark.parametrize("own", ["", "git init -q below"], ids=["no repository", "its own repository"])
async def test_workspace_below_a_repository_is_refused(cloned, own: str):
    """Guards against a history that the agent finds one directory further up."""
    await sh(cloned, f"mkdir below; {own}")
    with pytest.raises(SandboxError, match=r"repository /workspace holds it.* or set runtime.workspace.path=/work"):
        await cut_history(cloned, "/workspace/below")


async def test_diff_applies_below_a_repository(cloned):
    """git skipped all of its paths, and succeeded."""
    await sh(cloned, "mkdir below; echo old > below/file")
    git_dir = await pack_baseline(cloned, "/workspace/below")
    await sh(cloned, "echo new > below/file")
    diff = await snapshot_diff(cloned, "/workspace/below", git_dir)
    await sh(cloned, "echo old > below/file")
    await apply_diff(cloned, "/workspace/below", diff)
    assert (await sh(cloned, "cat below/file")).stdout == b"new\n"


async def test_image_without_a_repository(tmp_path: Path):
    need_bubblewrap()
    async with started(make("bubblewrap")) as sandbox:
        await sh(sandbox, "echo x > file")
        await cut_history(sandbox, "/workspace")
        git_dir = await pack_baseline(sandbox, "/workspace")
        assert await snapshot_diff(sandbox, "/workspace", git_dir) == b""
        with pytest.raises(SandboxError, match="cannot be recorded"):
            await pack_baseline(sandbox, "/no-such-workspace")


def test_repository_made_from_a_clone_has_no_future_either(tmp_path: Path):
    """The same law for a workspace that is a repository on the gateway's machine."""
    source = tmp_path / "source"
    source.mkdir()
    clone = CLONE.replace("/tmp/", f"{tmp_path}/")
    subprocess.run(["sh", "-c", clone], cwd=source, check=True, capture_output=True)
    make_repository(source, tmp_path / "made")
    found = subprocess.run(["sh", "-c", SECRETS], cwd=tmp_path / "made", capture_output=True, check=True)
    assert b"secret" not in found.stdout
    assert b"unreachable" not in found.stdout
    assert b"before" in found.stdout
