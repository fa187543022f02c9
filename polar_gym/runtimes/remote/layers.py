"""Files of the gateway's machine for sandboxes that can mount none: packed once, and sent by the hash of their content.

A sandbox keeps in STAMPS which content stands at which path. So a sandbox whose files outlive it, or whose image or
volume has them already, is sent only what is missing.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polar_gym.durable import make_once
from polar_gym.paths import cache_dir
from polar_gym.runtimes import Mount, SandboxError
from polar_gym.runtimes.files import digest, without_owner
from polar_gym.runtimes.remote.shell import Shell
from polar_gym.runtimes.remote.volumes import EMPTY, FILL, MARK, PREFIX, VOLUMES
from polar_gym.runtimes.threads import to_its_end

STAMPS = "/opt/polar-gym/.layers"
FORM = 1
"""The number of the way in which archives are made; a new way needs a new number."""

COMPRESSION = 1
"""Of the archives. A higher one takes longer to make than it spares on most networks."""

LARGE = 1 << 20
"""The bytes from which on an archive is worth a volume."""

LOOK = f"""
for each; do
    hash="${{each%%:*}}" path="${{each#*:}}"
    volume="{VOLUMES}/{PREFIX}$hash"
    if [ -e "$volume/{MARK}" ]; then
        chmod 755 "{VOLUMES}"
        rm -rf "$path" && mkdir -p "$(dirname "$path")" && ln -s "$volume/${{path##*/}}" "$path"
    elif [ "$(cat "{STAMPS}/$hash" 2> /dev/null)" != "$path" ] || [ ! -e "$path" ]; then
        echo "$each"
    fi
done
"""
"""The script that prints which of its arguments, each HASH:PATH, a sandbox lacks. A volume's content gets a link."""

UNPACK = f"""
set -e
rm -rf "$3"
mkdir -p "$(dirname "$3")" {STAMPS}
gzip -dc "$1" | tar -x -o -f - -C "$(dirname "$3")"
rm -f "$1"
printf %s "$3" > "{STAMPS}/$2"
"""
"""The script that unpacks an archive at a path: the archive's path, its hash, and the path."""


@dataclass(frozen=True)
class Layer:
    """A directory or file as a compressed tar whose one top entry has the name that the sandbox gives it."""

    archive: Path
    digest: str
    inside: str


async def pack(mounts: Sequence[Mount]) -> list[Layer]:
    """Return the layers that stand for mounts, packed where they are not in the cache. Raises `SandboxError`."""
    try:
        return await to_its_end(lambda: [_layer(mount, mount.host.stat().st_mtime_ns) for mount in mounts])
    except OSError as error:
        raise SandboxError(f"a mount could not be packed: {error}") from error


async def put(shell: Shell, layers: Sequence[Layer], directory: str) -> None:
    """Send the layers that a sandbox lacks, through its `directory`. Raises `SandboxError`."""
    archive = f"{directory}/layer.tar.gz"
    by_key = {f"{each.digest}:{each.inside}": each for each in layers}
    for key in (await shell.run(LOOK, *by_key)).split("\n") if by_key else ():
        if (layer := by_key.get(key)) is not None:
            await shell.send(layer.archive, archive)
            await shell.run(UNPACK, archive, layer.digest, layer.inside)


async def fill(shell: Shell, layers: Sequence[Layer], archive: str = "/tmp/layer.tar.gz") -> None:
    """Fill the volumes of a sandbox that are not filled. Raises `SandboxError`."""
    by_hash = {each.digest: each for each in layers}
    for empty in (await shell.run(EMPTY, *by_hash)).split():
        await shell.send(by_hash[empty].archive, archive)
        await shell.run(FILL, archive, empty, Path(by_hash[empty].inside).name)


@cache
def _layer(mount: Mount, _changed: int) -> Layer:
    """Pack what a mount shows; `_changed` keeps the answer from outliving a change of the directory itself."""
    name = Path(mount.inside).name
    hashed = digest(mount.host, (FORM, name))
    archive = cache_dir() / "layers" / f"{hashed}.tar.gz"
    archive.parent.mkdir(parents=True, exist_ok=True)

    def pack(directory: Path) -> Path:
        made = directory / "made"
        with tarfile.open(made, "w:gz", format=tarfile.GNU_FORMAT, compresslevel=COMPRESSION) as tar:
            tar.add(mount.host, arcname=name, filter=_read_only)
        return made

    if not archive.exists():
        make_once(archive, pack)
    return Layer(archive, hashed, mount.inside)


def _read_only(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an entry as root's, which nobody else may write."""
    entry.mode &= ~0o022
    return without_owner(entry)
