"""The diff law: what `snapshot_diff` takes from one sandbox, `apply_diff` brings to another, whatever the agent did."""

import asyncio
import io
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polar_gym.runtimes import Command, Runtime, Sandbox
from polar_gym.runtimes.files import pack, unpack
from polar_gym.workspaces import diff as diff_module
from polar_gym.workspaces.diff import UnreadableWorkspaceError, apply_diff, left_behind, snapshot_diff
from tests.lifecycle.runtime_kinds import make, make_runtime, runtime, sh, started
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need_bubblewrap

__all__ = ["docker_host", "make_runtime", "runtime"]

WORKSPACE = "/workspace"


@dataclass(frozen=True)
class File:
    content: bytes
    executable: bool = False


Tree = Mapping[str, File | str]
"""Path -> a file, or the target of a symbolic link. Directories are there where files are: git knows no others."""


def write_tree(tree: Tree, directory: Path) -> None:
    for name, entry in tree.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, str):
            path.symlink_to(entry)
        else:
            path.write_bytes(entry.content)
            path.chmod(0o755 if entry.executable else 0o644)


def make_repository(tree: Tree, directory: Path) -> bytes:
    """A repository with one commit; the tar of its `.git`."""
    directory.mkdir(exist_ok=True)
    write_tree(tree, directory)
    git = ["git", "-C", str(directory), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.protectNTFS=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "base"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return pack(directory / ".git")


async def replace_tree(sandbox: Sandbox, tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_tree(tree, Path(directory))
        await sh(sandbox, "find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +")
        await unpack(sandbox, pack(Path(directory)), WORKSPACE)


async def read_tree(sandbox: Sandbox) -> Tree:
    result = await sandbox.exec(Command(argv=["tar", "-c", "--exclude=./.git", "."]))
    tree: dict[str, File | str] = {}
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as tar:
        for entry in tar:
            if entry.issym():
                tree[entry.name.removeprefix("./")] = entry.linkname
            elif (file := tar.extractfile(entry)) is not None:
                tree[entry.name.removeprefix("./")] = File(file.read(), bool(entry.mode & 0o100))
    return tree


PATHS = (
    "a",
    "b c",
    "dir",
    "dir/x",
    "dir/ü ñ",
    "dir/sub/y",
    "dir/sub/-z",
    'q"uote\\',
    "tab\there",
    "git~1",
    "ünï",
    "new\nline",
    "blank /end",
)
ENTRIES = st.one_of(
    st.builds(File, st.binary(max_size=300), st.booleans()),
    st.builds(File, st.lists(st.sampled_from([b"one\n", b"two\r\n", b"three"])).map(b"".join), st.booleans()),
    st.sampled_from(["a", "../outside", "dir/ü ñ"]),
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Trees without a file where another's directory is."""
    tree: dict[str, File | str] = {}
    for path in draw(st.lists(st.sampled_from(PATHS), unique=True)):
        if not any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in tree):
            tree[path] = draw(ENTRIES)
    return tree


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=trees(), after=trees())
@example(before={"dir": "dir/ü ñ"}, after={"dir/x": File(b"", False)})  # a link that leads to itself
def test_diff_reproduces_the_tree(before: Tree, after: Tree):
    need_bubblewrap()

    async def carry() -> None:
        runtime = make("bubblewrap")
        with tempfile.TemporaryDirectory() as directory:
            git_dir = make_repository(before, Path(directory))
            async with started(runtime, workspace=Path(directory)) as worked:
                await replace_tree(worked, after)
                diff = await snapshot_diff(worked, WORKSPACE, git_dir)
                assert await read_tree(worked) == after, "taking the diff changed the workspace"
            async with started(runtime, workspace=Path(directory)) as fresh:
                await apply_diff(fresh, WORKSPACE, diff)
                assert await read_tree(fresh) == after
        assert (diff == b"") == (before == after)

    asyncio.run(carry())


async def test_empty_directories_of_the_base_keep_no_directory(tmp_path: Path):
    """Guards against right work that is graded 0 because a directory that it replaced held an empty one, in no diff."""
    need_bubblewrap()
    git_dir = make_repository({"data/x": File(b"x")}, tmp_path / "repo")
    (tmp_path / "repo" / "data" / "cache" / "deeper").mkdir(parents=True)
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as worked:
        await sh(worked, "rm -r data; mkdir real; echo y > real/y; ln -s real data")
        diff, after = await snapshot_diff(worked, WORKSPACE, git_dir), await read_tree(worked)
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == after


async def test_the_directory_of_a_submodule_stays_one(tmp_path: Path):
    """Guards against a patch that moves a submodule, whose directory is empty here, and that git then refuses."""
    need_bubblewrap()
    make_repository({"a": File(b"x")}, tmp_path / "repo")
    old, new = "1" * 40, "2" * 40
    patch = (
        f"diff --git a/sub b/sub\nindex {old}..{new} 160000\n--- a/sub\n+++ b/sub\n@@ -1 +1 @@\n"
        f"-Subproject commit {old}\n+Subproject commit {new}\n"
    )
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        await sh(sandbox, "mkdir sub")
        assert await apply_diff(sandbox, WORKSPACE, patch.encode()) == {b"sub"}
        assert (await sh(sandbox, "test -d sub")).exit_code == 0


async def test_files_in_a_directory_with_a_blank_at_its_end_are_carried(tmp_path: Path):
    """Guards against a name that `git diff` writes for an empty or a binary file, and `git apply` refuses."""
    need_bubblewrap()
    git_dir = make_repository({"a": File(b"x"), "old /b": File(b"\0")}, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as worked:
        await sh(
            worked, "mkdir 'notes '; : > 'notes /a'; printf 'a\\0' > 'notes /b'; echo z > 'notes /c d'; rm 'old /b'"
        )
        diff, after = await snapshot_diff(worked, WORKSPACE, git_dir), await read_tree(worked)
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        carried = await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == after
    assert carried == {b"notes /a", b"notes /b", b"notes /c d", b"old /b"}


BASE: Tree = {"kept.py": File(b"kept = 1\n"), "changed.py": File(b"value = 1\n"), "removed.py": File(b"old = 1\n")}
WORK = "echo 'value = 2' > changed.py; rm removed.py; mkdir -p pkg; printf 'a\\0b' > pkg/new.bin; chmod +x kept.py"

MISCHIEF = {
    "commits": "git add -A; git -c user.name=a -c user.email=a@a commit -qm done",
    "deletes .git": "rm -rf .git",
    "breaks .git": "echo nonsense > .git/HEAD; rm -rf .git/objects",
    "replaces .git": "rm -rf .git; git init -q; git add -A; git -c user.name=a -c user.email=a@a commit -qm other",
    "configures": (
        "git config core.fsmonitor 'touch /tmp/ran; false'; git config core.hooksPath /tmp/hooks;"
        "git config core.fileMode false; git config diff.external false; git config core.excludesFile /tmp/all;"
        "git config core.worktree /tmp; echo '*' > /tmp/all; echo '*' > .git/info/exclude;"
        "printf '[core]\\n excludesFile = /tmp/all\\n[diff]\\n noprefix = true\\n external = false\\n' > ~/.gitconfig;"
        "mkdir /tmp/hooks; printf '#!/bin/sh\\ntouch /tmp/ran\\n' > /tmp/hooks/post-index-change; chmod +x /tmp/hooks/*"
    ),
    "hides changes": "git update-index --assume-unchanged changed.py; git update-index --skip-worktree removed.py",
    "locks": "chmod 000 changed.py pkg",
    "leaves pipes": "mkfifo pipe pkg/pipe",
    "leaves links that git refuses": "ln -s .gitmodules .gitmodules; mkdir -p new; ln -s nowhere new/.GITMODULES",
    "holds the index": "touch .git/index.lock .git/HEAD.lock",
    "sets attributes elsewhere": (
        "mkdir -p .git/info ~/.config/git; echo '* filter=x eol=crlf' > .git/info/attributes;"
        "cp .git/info/attributes ~/.config/git/attributes;"
        "git config filter.x.clean 'touch /tmp/ran; cat'; git config filter.x.required true"
    ),
    "shadows git": "mkdir ~/bin; printf '#!/bin/sh\\ntouch /tmp/ran\\n' > ~/bin/git; chmod +x ~/bin/git",
}


@pytest.mark.parametrize("mischief", MISCHIEF)
async def test_agents_git_has_no_say(tmp_path: Path, mischief: str):
    """Each of these once changed, emptied or failed a diff that trusted the workspace's own repository."""
    need_bubblewrap()
    runtime = make("bubblewrap")
    git_dir = make_repository(BASE, tmp_path / "repo")
    diffs = []
    for script in (WORK, f"{WORK}; {MISCHIEF[mischief]}"):
        async with started(runtime, workspace=tmp_path / "repo") as sandbox:
            done = await sh(sandbox, script)
            assert done.exit_code == 0, done.stderr
            diffs.append(await snapshot_diff(sandbox, WORKSPACE, git_dir))
            assert (await sh(sandbox, "ls -A /tmp/ran /tmp/.snapshot* 2> /dev/null")).stdout == b""
    assert diffs[0]
    assert diffs[0] == diffs[1]


async def test_an_older_git_reads_no_configuration_of_the_agent_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """git before 2.32 does not know GIT_CONFIG_GLOBAL: the agent's `~/.gitconfig` emptied the diff."""
    monkeypatch.delitem(diff_module._NO_CONFIGURATION, "GIT_CONFIG_GLOBAL")
    await test_agents_git_has_no_say(tmp_path, "configures")


ATTRIBUTES = {
    "line ends": "* text eol=crlf",
    "an encoding": "*.py working-tree-encoding=UTF-16",
    "a filter": "* filter=x",
    "identifiers": "* ident",
    "no differences": "* -diff",
}


@pytest.mark.parametrize("attribute", ATTRIBUTES.values(), ids=ATTRIBUTES)
async def test_agents_attributes_do_not_change_what_is_carried(tmp_path: Path, attribute: str):
    """They said how `git add` reads files: a carriage return was lost, and an encoding made it fail."""
    need_bubblewrap()
    runtime = make("bubblewrap")
    git_dir = make_repository({**BASE, "sub/.gitattributes": File(b"*.txt text\n")}, tmp_path / "repo")
    async with started(runtime, workspace=tmp_path / "repo") as sandbox:
        await sh(sandbox, r"printf 'a\r\nb\n$Id: x$\n' > changed.py; rm sub/.gitattributes")
        await sh(sandbox, 'printf "%s\\n" "$1" > .gitattributes; mkdir new; cp .gitattributes new', attribute)
        expected = await read_tree(sandbox)
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        assert await read_tree(sandbox) == expected
    async with started(runtime, workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == expected


@pytest.mark.parametrize("instead", ["echo x > {0}", "mkdir other; ln -s other {0}; echo x > other/y"])
@pytest.mark.parametrize("name", ["data", "größe"])
async def test_directory_with_attributes_becomes_something_else(tmp_path: Path, name: str, instead: str):
    """A file or link that the agent put in its place was removed, to write the attributes of the base commit."""
    need_bubblewrap()
    tree: Tree = {**BASE, f"{name}/.gitattributes": File(b"* text\n"), f"{name}/x": File(b"x\n")}
    git_dir = make_repository(tree, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        assert (await sh(sandbox, f"rm -r {name}; {instead.format(name)}")).exit_code == 0
        expected = await read_tree(sandbox)
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        assert await read_tree(sandbox) == expected
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == expected


async def test_what_is_not_carried_is_named(tmp_path: Path):
    need_bubblewrap()
    git_dir = make_repository({**BASE, ".gitignore": File(b"build/\n*.log\n")}, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        made = "mkdir build __pycache__; touch build/x run.log __pycache__/x.pyc /tmp/note ~/answer ~/.hidden new.py"
        assert (await sh(sandbox, made)).exit_code == 0
        assert sorted(await left_behind(sandbox, WORKSPACE)) == ["/home/agent/answer", "/tmp/note", "build/", "run.log"]
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
    assert b"new.py" in diff
    assert b"build" not in diff
    assert b"run.log" not in diff


INSTEAD = {
    "a file": "rm -r data build '[o]ld *'; echo x > data; echo x > build; echo x > '[o]ld *'",
    "a link": "rm -r data build '[o]ld *'; ln -s /tmp data; ln -s changed.py build; ln -s nowhere '[o]ld *'",
}


@pytest.mark.parametrize("instead", INSTEAD.values(), ids=INSTEAD)
async def test_directory_with_ignored_files_becomes_something_else(tmp_path: Path, instead: str):
    """The ignored files kept the directory in the fresh sandbox, and its diff did not apply."""
    need_bubblewrap()
    tree: Tree = {**BASE, ".gitignore": File(b"build/\n*.log\n"), "[o]ld */x": File(b"x\n"), "data/x": File(b"x\n")}
    git_dir = make_repository(tree, tmp_path / "repo")
    write_tree({each: File(b"") for each in ("build/y", "[o]ld */y.log", "data/y.log")}, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        assert (await sh(sandbox, instead)).exit_code == 0
        expected = await read_tree(sandbox)
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == expected


async def test_only_ignored_files_make_room(tmp_path: Path):
    """Guards against a diff that removes hidden tests, or a directory outside of the grading sandbox's workspace."""
    need_bubblewrap()
    tree: Tree = {**BASE, ".gitignore": File(b"*.log\n"), "tests/x": File(b"x\n"), "outside": "/tmp"}
    git_dir = make_repository(tree, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        begun = "rm outside; mkdir outside; echo x > outside/kept; echo > 'ignored\nfile'"
        assert (await sh(sandbox, begun)).exit_code == 0
        outside = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        assert (await sh(sandbox, "rm -r tests; echo x > tests")).exit_code == 0
        instead = await snapshot_diff(sandbox, WORKSPACE, git_dir)
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await sh(fresh, "echo hidden > tests/hidden; mkdir /tmp/kept ignored; touch /tmp/kept/file.log ignored/x.log")
        await apply_diff(fresh, WORKSPACE, outside)
        assert (await sh(fresh, "ls /tmp/kept ignored; cat outside/kept")).stdout == (
            b"/tmp/kept:\nfile.log\n\nignored:\nx.log\nx\n"
        )
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await sh(fresh, "echo hidden > tests/hidden; mkdir /tmp/kept; touch /tmp/kept/file.log")
        with pytest.raises(ValueError, match=r"does not apply .*tests"):
            await apply_diff(fresh, WORKSPACE, instead)
        assert (await sh(fresh, "cat tests/hidden; ls /tmp/kept")).stdout == b"hidden\nfile.log\n"
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as fresh:
        await sh(fresh, "rm -r .git")
        await apply_diff(fresh, WORKSPACE, instead)
        assert (await sh(fresh, "cat tests")).stdout == b"x\n", "an image need not have a repository"


async def test_attributes_that_are_ignored_are_not_carried(tmp_path: Path):
    """Guards against diffs that make a file which a package in the fresh sandbox has, too: none of them applied."""
    need_bubblewrap()
    git_dir = make_repository({**BASE, ".gitignore": File(b"vendor/\n")}, tmp_path / "repo")
    write_tree({"vendor/.gitattributes": File(b"* text\n")}, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        assert await snapshot_diff(sandbox, WORKSPACE, git_dir) == b""


async def test_workspace_that_the_agent_made_unreadable_is_its_own_doing(tmp_path: Path):
    """It is scored: masked, an agent could buy itself out of a zero."""
    need_bubblewrap()
    git_dir = make_repository(BASE, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        await sh(sandbox, "chmod 500 /tmp")
        with pytest.raises(UnreadableWorkspaceError):
            await snapshot_diff(sandbox, WORKSPACE, git_dir)


@pytest.mark.parametrize("ignores", ["", "echo '!*' > .gitignore; cp .gitignore .pytest_cache"])
async def test_bytecode_is_not_the_agents_work(tmp_path: Path, ignores: str):
    """Guards against diffs full of what running the tests left behind, and against tests shadowed by compiled ones.
    A `.gitignore` once took in all of it, and the names that `snapshot_diff` gives to nested repositories."""
    need_bubblewrap()
    git_dir = make_repository(BASE, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        made = "mkdir -p a/__pycache__ .pytest_cache; touch a/__pycache__/x.cpython-311.pyc y.pyo .pytest_cache/v"
        made += "; git init -q nested; touch .gitattributes nested/x"
        assert (await sh(sandbox, f"{made}; {ignores}")).exit_code == 0
        carried = await snapshot_diff(sandbox, WORKSPACE, git_dir)
    names = re.findall(rb"^diff --git a/(\S+)", carried, re.MULTILINE)
    assert names == [b".gitattributes", *([b".gitignore"] if ignores else []), b"nested/x"]


@pytest.mark.parametrize(
    "inner",
    [
        "git init -q vendored",
        "git init -q vendored; cd vendored; git -c user.name=a -c user.email=a@a commit -qm x --allow-empty",
        "mkdir -p vendored/.GIT; touch vendored/.GIT/config",
        "mkdir -p vendored; echo 'gitdir: /nowhere' > vendored/.git",
    ],
)
async def test_nested_repository_is_carried_as_files(tmp_path: Path, inner: str):
    """git records it as a link to a commit, and the files in it are lost; without a commit, `git add` fails."""
    need_bubblewrap()
    runtime = make("bubblewrap")
    git_dir = make_repository(BASE, tmp_path / "repo")
    async with started(runtime, workspace=tmp_path / "repo") as sandbox:
        assert (await sh(sandbox, f"({inner}) && echo code > vendored/file")).exit_code == 0
        listing = (await sh(sandbox, "find vendored | sort")).stdout
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        assert (await sh(sandbox, "find vendored | sort")).stdout == listing
    async with started(runtime, workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == {**BASE, "vendored/file": File(b"code\n")}


async def test_diff_in_every_runtime(runtime: Runtime, tmp_path: Path):
    git_dir = make_repository(BASE, tmp_path / "repo")
    async with started(runtime, workspace=tmp_path / "repo") as sandbox:
        assert await snapshot_diff(sandbox, WORKSPACE, git_dir) == b""
        await sh(sandbox, f"{WORK}; rm -rf .git")
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        expected = await read_tree(sandbox)
    async with started(runtime, workspace=tmp_path / "repo") as fresh:
        await apply_diff(fresh, WORKSPACE, b"")
        assert await read_tree(fresh) == BASE
        await apply_diff(fresh, WORKSPACE, diff)
        assert await read_tree(fresh) == expected
        with pytest.raises(ValueError, match=r"does not apply .*changed\.py"):
            await apply_diff(fresh, WORKSPACE, diff)


async def test_diff_is_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A diff cut at a command's usual output limit would be applied as garbage, or not at all."""
    need_bubblewrap()
    git_dir = make_repository(BASE, tmp_path / "repo")
    async with started(make("bubblewrap"), workspace=tmp_path / "repo") as sandbox:
        await sh(sandbox, "head -c 12000000 /dev/urandom > big.bin")
        diff = await snapshot_diff(sandbox, WORKSPACE, git_dir)
        assert len(diff) > 12_000_000
        monkeypatch.setattr(diff_module, "MAX_DIFF", len(diff) - 1)
        with pytest.raises(UnreadableWorkspaceError, match="longer than"):
            await snapshot_diff(sandbox, WORKSPACE, git_dir)
        with pytest.raises(UnreadableWorkspaceError, match="failed with exit code"):
            await snapshot_diff(sandbox, "/no-such-workspace", git_dir)
