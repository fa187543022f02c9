"""Unpacking what nobody vouches for: nothing leaves the directory, with `tarfile`'s filters and without."""

import io
import tarfile
from pathlib import Path

import pytest

from polar_gym.runtimes import tar


def archive(*members: tuple[str, str]) -> tarfile.TarFile:
    """(name, where a link leads; "": a file)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            made.addfile(member)
    buffer.seek(0)
    return tarfile.open(fileobj=buffer)


@pytest.fixture(params=["filters", "no filters"], autouse=True)
def _python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def test_files_and_harmless_links_are_unpacked(tmp_path: Path) -> None:
    with archive(("a/file", ""), ("a/link", "file")) as files:
        tar.unpack(files, tmp_path, "tar")
    assert (tmp_path / "a" / "link").readlink() == Path("file")


@pytest.mark.parametrize("members", [[("../out", "")], [("link", ".."), ("link/out", "")]])
@pytest.mark.parametrize("trust", ["data", "tar"])
def test_nothing_is_written_elsewhere(tmp_path: Path, members: list[tuple[str, str]], trust: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with archive(*members) as files, pytest.raises(tarfile.TarError):
        tar.unpack(files, inside, trust)  # pyright: ignore[reportArgumentType]
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
