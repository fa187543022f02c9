"""Moves files into and out of a sandbox through commands: the one way that works in every runtime."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from polar_gym.runtimes import Command, Sandbox, SandboxError

MAX_FILE = 64 * 1024 * 1024
TRANSFER_SECONDS = 300.0


class UnreadableFileError(SandboxError):
    """A file in the sandbox is too long or cannot be read. The sandbox says so, and is not lost."""


def pack(directory: Path) -> bytes:
    """Return the content of a directory as a tar. Sockets, pipes and devices are left out."""
    buffer = io.BytesIO()
    # The GNU format: the tar of small images knows no other format that holds long names.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(directory.iterdir()):
            tar.add(path, arcname=path.name, filter=without_owner)
    return buffer.getvalue()


def digest(path: Path, other: object) -> str:
    """Return a hash of a file or directory: of its files and their modes, and of `other`."""
    found = hashlib.sha256(repr(other).encode())
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_symlink():
            content = f"link {each.readlink()}"
        elif each.is_file():
            with each.open("rb") as file:
                content = f"{each.stat().st_mode & 0o777:o} {hashlib.file_digest(file, 'sha256').hexdigest()}"
        else:
            content = ""
        found.update(repr((str(each.relative_to(path)), content)).encode())
    return found.hexdigest()[:32]


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an entry of a tar as root's; None for sockets, pipes and devices."""
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
    return entry


async def unpack(sandbox: Sandbox, archive: bytes, directory: str) -> None:
    """Extract a tar into an existing directory of the sandbox, as the agent's files. Raises `SandboxError`."""
    argv = ["tar", "-x", "-o", "-f", "-", "-C", directory]
    result = await sandbox.exec(Command(argv=argv, workdir="/", stdin=archive, timeout_seconds=TRANSFER_SECONDS))
    if result.exit_code != 0:
        reason = "it took too long" if result.timed_out else result.stderr.decode(errors="replace").strip()
        raise SandboxError(f"files could not be written to {directory} in the sandbox: {reason}")


async def write_files(sandbox: Sandbox, files: Mapping[str, str | bytes]) -> None:
    """Write files (absolute path -> content) and the directories above them. Raises `SandboxError`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    await unpack(sandbox, buffer.getvalue(), "/")


async def read_file(sandbox: Sandbox, path: str) -> bytes:
    """Return a file's content. Raises `FileNotFoundError`, `UnreadableFileError`, or `SandboxError`."""
    script = f'[ -f "$1" ] || exit 66; [ "$(wc -c < "$1")" -le {MAX_FILE} ] || exit 67; exec cat -- "$1"'
    argv = ["sh", "-c", script, "sh", path]
    result = await sandbox.exec(
        Command(argv=argv, workdir="/", timeout_seconds=TRANSFER_SECONDS, output_limit=2 * MAX_FILE)
    )
    if result.exit_code == 66:
        raise FileNotFoundError(f"{path} does not exist in the sandbox")
    if result.exit_code is None:
        raise SandboxError(f"{path} in the sandbox could not be read: it took too long")
    if result.exit_code == 67:
        raise UnreadableFileError(f"{path} in the sandbox is longer than {MAX_FILE} bytes")
    if result.exit_code != 0:
        reason = result.stderr.decode(errors="replace").strip()
        raise UnreadableFileError(f"{path} in the sandbox could not be read: {reason}")
    return result.stdout
