"""Sessions that begin from the same files have one repository, for as long as one of them needs it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.workspaces import shared
from polar_gym.workspaces.repository import WorkspaceError
from polar_gym.workspaces.shared import Repositories
from tests.lifecycle.other_gateway import NOBODY


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (source := tmp_path / "source").mkdir()
    (source / "file").write_text("one")
    (source / "link").symlink_to("file")
    return source


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (place := tmp_path / "place").mkdir()
    return place


async def test_a_group_has_one_repository_until_its_files_change(source: Path, place: Path) -> None:
    repositories = Repositories(place, keep_bytes=0)
    group = await asyncio.gather(*(repositories.take(source, f"s{n}") for n in range(16)))
    assert len(set(group)) == len(list(place.iterdir())) == 1
    assert group[0].base.read_bytes()
    (source / "file").write_text("two")
    later = await repositories.take(source, "later")
    assert [(each.path / "file").read_text() for each in (group[0], later)] == ["one", "two"]
    for n in range(15):
        await repositories.give_back(f"s{n}")
    assert group[0].path.exists(), "the last of the group needs it"
    await repositories.give_back("s15")
    await repositories.give_back("s15")
    assert list(place.iterdir()) == [later.directory]


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: others give a directory no other group")
async def test_a_repository_has_one_group_in_a_setgid_directory(source: Path, place: Path) -> None:
    """Guards against a `.git` that the agent cannot write: the sandbox shows the files of one group as the agent's."""
    os.chown(place, 0, 1000)
    place.chmod(0o2755)
    made = await Repositories(place, keep_bytes=0).take(source, "s")
    assert {path.lstat().st_gid for path in (made.directory, *made.directory.rglob("*"))} == {os.getegid()}


async def test_a_repository_that_is_being_removed_is_neither_removed_again_nor_taken(source: Path, place: Path) -> None:
    """Guards against a KeyError that ended a whole run, and against sessions whose repository was gone."""
    repositories = Repositories(place, keep_bytes=0)
    for text, user in (("one", "u"), ("two", "u"), ("six", "v")):
        (source / "file").write_text(text)
        await repositories.take(source, user)
    ends = [asyncio.create_task(repositories.give_back(user)) for user in ("u", "v", "u")]
    taken = await repositories.take(source, "w")
    await asyncio.gather(*ends)
    assert list(place.iterdir()) == [taken.directory]
    assert (taken.path / "file").read_text() == "six"


async def test_those_that_were_asked_for_last_are_kept(source: Path, place: Path) -> None:
    size = (await Repositories(place).take(source, "x")).size
    repositories = Repositories(place, keep_bytes=size + size // 2)
    for text in ("two", "six", "two"):
        (source / "file").write_text(text)
        last = await repositories.take(source, text)
        await repositories.give_back(text)
    assert last.path.exists()
    assert await repositories.take(source, "again") == last
    assert len(list(place.iterdir())) == 2, "that of the first line, and the last one"


@pytest.mark.parametrize("change", ["mode", "link", "name", "deletion"])
async def test_every_change_is_seen(source: Path, place: Path, change: str) -> None:
    repositories = Repositories(place)
    before = await repositories.take(source, "a")
    if change == "mode":
        (source / "file").chmod(0o755)
    elif change == "link":
        (source / "link").unlink()
        (source / "link").symlink_to("else")
    elif change == "name":
        (source / "file").rename(source / "other")
    else:
        (source / "link").unlink()
    assert await repositories.take(source, "a") != before


async def test_what_fails_is_tried_again(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repositories = Repositories(place)
    with pytest.raises(WorkspaceError, match="is not a directory"):
        await repositories.take(source / "nothing", "a")
    with monkeypatch.context() as patched:
        patched.setattr(shared, "pack_git_dir", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await repositories.take(source, "a")
    assert list(place.iterdir()) == []
    assert (await repositories.take(source, "a")).path.exists()


WITHOUT_ROOT = """
import asyncio, os, tempfile
from pathlib import Path
from polar_gym.workspaces.shared import Repositories

async def main():
    with tempfile.TemporaryDirectory() as directory:
        source, place = Path(directory, "source"), Path(directory, "place")
        (source / "closed").mkdir(parents=True)
        place.mkdir()
        (source / "closed" / "file").touch()
        (source / "closed").chmod(0o555)
        repositories = Repositories(place, keep_bytes=0)
        taken = await repositories.take(source, "a")
        assert (taken.path / "closed" / "file").exists()
        await repositories.give_back("a")
        assert not list(place.iterdir())
        (source / "closed").chmod(0o755)

if os.geteuid() == 0:
    asyncio.run(main())  # loads all modules while this user still may read them
    os.setgroups([]); os.setgid(NOBODY); os.setuid(NOBODY)
    os.environ["HOME"] = "/"
asyncio.run(main())
"""


def test_one_with_a_directory_that_cannot_be_written_is_removed() -> None:
    """Guards against Go's module cache in a workspace: without root the end of a session raised, and undid it."""
    program = WITHOUT_ROOT.replace("NOBODY", str(NOBODY))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_one_that_is_cancelled_takes_nothing_from_the_others(source: Path, place: Path) -> None:
    repositories = Repositories(place)
    one, other = (asyncio.create_task(repositories.take(source, name)) for name in ("one", "other"))
    await asyncio.wait({one}, timeout=0.001)
    one.cancel()
    assert (await other).path.exists()
    await repositories.close()
