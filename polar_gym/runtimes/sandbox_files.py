"""The files of a sandbox without a daemon on the gateway's machine: its scratch directory with the workspace."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar_gym.runtimes import DiskFullError, SandboxError, agent, scratch_directory, tar
from polar_gym.runtimes.kernel import cgroups, copy_on_write, disk, subordinate, uids
from polar_gym.runtimes.limits import MEBIBYTE, LimitOptions
from polar_gym.runtimes.threads import to_its_end

log = logging.getLogger(__name__)

UNLIMITED = "what a sandbox writes is not limited as a whole, because it can have no file system of its own"


async def make(session_id: str, root: Path | None, *, own_uid: bool = False) -> tuple[Path, uids.Claim]:
    """Make a scratch directory with an empty home, /tmp and workspace for the agent; return it with the agent's uid.

    Without root, a uid is claimed only where `own_uid` asks for it and this user has subordinate ones. Else the agent
    has the gateway's uid outside of the sandbox. Raises `SandboxError`.
    """
    with contextlib.ExitStack() as on_error:
        if os.geteuid() == 0:
            claim = uids.claim()
        else:
            space, caveat = await to_its_end(_without_root, own_uid)
            claim = uids.Claim(agent.UID) if space is None else uids.claim(space)
            say_once(caveat)
        on_error.callback(claim.release)
        try:
            scratch = scratch_directory.make(session_id, root)  # before the first await, so that `remove` can be called
            try:
                await to_its_end(_fill, scratch, claim)
            except BaseException:
                await to_its_end(remove, scratch)
                raise
        except OSError as error:
            raise SandboxError(f"no scratch directory could be made: {error}; set runtime.scratch") from error
        on_error.pop_all()
    return scratch, claim


def _without_root(own_uid: bool) -> tuple[subordinate.Namespace | None, str]:
    """Return a plain user's namespace, and the promises about uids that cannot be kept. Blocks."""
    limits, reason = "what the kernel limits for each uid, one may use up for all", ""
    try:
        if own_uid:
            return subordinate.namespace(), f"each sandbox has a uid of its own, so workspaces are copied; yet {limits}"
    except SandboxError as error:
        reason = f" ({error})"
    return None, f"all sandboxes share the uid {os.geteuid()}{reason}: {limits}"


def _fill(scratch: Path, claim: uids.Claim) -> None:
    for name in ("etc", *(f"disk/{each}" for each in (*disk.AGENTS, *disk.ROOTS))):
        (scratch / name).mkdir(parents=True)
    accounts = agent.accounts(claim.uid)
    for name, text in agent.ETC.items():
        (file := scratch / "etc" / name).write_text(text + accounts.get(name, ""))
        file.chmod(0o644)  # whatever the gateway's umask
    give_to_agent([scratch / "disk" / name for name in disk.AGENTS], claim)


async def own_disk(scratch: Path, limits: LimitOptions, claim: uids.Claim) -> disk.Disk:
    """Return the sandbox's disk. Raises `DiskFullError` where the machine's disk is full."""
    size = disk.share(scratch, limits.disk_mb)
    if os.geteuid() == 0 and limits.disk_mb is not None:  # others share the disk
        _check_share(scratch.parent, size, limits.disk_mb)
    try:
        return await disk.limited(scratch, size)
    except copy_on_write.OverlayError as error:
        say_once(f"{UNLIMITED}: {' '.join(str(error).split())}", "disk")
    return disk.Disk(scratch, size, enter=claim.enter)


def _check_share(place: Path, size: int, limit_mb: int) -> None:
    """Raise `DiskFullError` where a sandbox may write far less than promised; warn of less than a quarter."""
    promised = limit_mb * MEBIBYTE
    told = (
        f"a sandbox may write {size // MEBIBYTE} MiB, not runtime.disk_mb={limit_mb}: it gets an eighth of the space "
        f"that is free at {place}; free some space, set runtime.scratch"
    )
    if size < min(promised, disk.LEAST_SHARE):
        raise DiskFullError(f"no sandbox can be made: {told}, or lower runtime.disk_mb")
    if size < promised // 4:
        say_once(told, f"{place}: {size.bit_length()}")  # again when half of it is left


async def settle(own: disk.Disk) -> None:
    """Look after the disk of a sandbox in which a command has ended. Raises `SandboxError` where it cannot be used."""
    try:
        await asyncio.to_thread(own.settle)
    except OSError as error:
        raise SandboxError(str(error)) from error


async def show_workspace(source: Path, own: disk.Disk, claim: uids.Claim, own_files: bool) -> copy_on_write.View | None:
    """Put a writable copy of `source` into the scratch directory; return the view where the copy is made on write.

    `own_files`: see `SandboxRequest`.

    Raises `SandboxError`.
    """
    upper, work, at = (own.scratch / name for name in ("disk/upper", "disk/work", "disk/workspace"))
    if not claim.enter:  # else an overlay would copy the content of each file that is given to the agent
        try:
            return await copy_on_write.view(
                source.resolve(), upper, work, at, uid=claim.uid, through=own.enter, roots=own_files
            )
        except copy_on_write.OverlayError as error:
            say_once(f"workspaces are copied, because no overlay can be mounted here: {error}", "overlay")
    await copy_workspace(source, own, claim)
    return None


async def copy_workspace(source: Path, own: disk.Disk, claim: uids.Claim) -> None:
    """Copy `source` into the scratch directory. Raises `SandboxError`."""
    try:
        await to_its_end(_copy, source, own.seen(own.scratch / "disk" / "workspace"), claim)
    except OSError as error:
        raise SandboxError(f"the workspace {source} could not be copied: {error}") from error


def _copy(source: Path, destination: Path, claim: uids.Claim) -> None:
    _run(claim, "cp", "-a", "--no-preserve=ownership", "--reflink=auto", "--", f"{source}/.", str(destination))
    give_to_agent([destination], claim)


def unpack_workspace(archive: bytes | None, own: disk.Disk, claim: uids.Claim) -> None:
    """Extract a tar as the workspace; None: the workspace stays empty. Blocks. Raises `SandboxError`."""
    if archive is None:
        return
    workspace = own.seen(own.scratch / "disk" / "workspace")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            tar.unpack(files, workspace, "tar")
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"the image's workspace could not be unpacked: {error}") from error
    give_to_agent([workspace], claim)


def give_to_agent(directories: Sequence[Path], claim: uids.Claim) -> None:
    """Make the agent's uid the owner of these and of all files below. Raises `OSError`."""
    if claim.owner is not None:  # else it is the gateway's own
        _run(claim, "chown", "-R", "-h", f"{claim.uid}:{claim.uid}", *map(str, directories))


def _run(claim: uids.Claim, *argv: str) -> None:
    done = subprocess.run([*claim.enter, *argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-1000:])


def limit(scratch: Path, limits: LimitOptions) -> cgroups.Cgroup | None:
    """Return a control group for this sandbox; None where none can be made. Blocks."""
    try:
        return cgroups.make(scratch.name, limits)
    except cgroups.CgroupError as error:
        say_once(f"sandboxes are limited process by process only: {error}", "limits")
        return None


def remove(scratch: Path) -> None:
    """Remove a sandbox's control group and files. Blocks."""
    cgroups.find(scratch.name).remove()
    scratch_directory.remove(scratch)


def caveats(limits: LimitOptions, *, own_uid: bool = False) -> list[str]:
    """Return the limits that this machine cannot keep, and whether workspaces are copied. Blocks."""
    found = []
    if os.geteuid() != 0:
        found.append(_without_root(own_uid)[1])
    try:
        cgroups.make(f"polar-gym-trial-{os.getpid()}", limits).remove()
    except cgroups.CgroupError as error:
        found.append(f"{error}: memory is limited for each process alone, processes and cores are not limited")
    try:
        asyncio.run(_try_overlay())
    except copy_on_write.OverlayError as error:
        found.append(f"no overlay can be mounted here ({error}): workspaces are copied")
    try:
        asyncio.run(_try_disk())
    except copy_on_write.OverlayError as error:
        found.append(
            f"{UNLIMITED} ({' '.join(str(error).split())}): a harness that fills the disk can mask other sessions"
        )
    return found


async def _try_disk() -> None:
    with tempfile.TemporaryDirectory(prefix="polar-gym-") as directory:
        await to_its_end(_fill, Path(directory), uids.Claim(agent.UID))
        if (view := (await disk.limited(Path(directory), disk.LEAST_FREE)).view) is not None:
            await view.close()


async def _try_overlay() -> None:
    with tempfile.TemporaryDirectory(prefix="polar-gym-") as directory:
        lower, upper, work, at = (Path(directory, name) for name in ("lower", "upper", "work", "at"))
        for place in (lower, upper, work, at):
            place.mkdir()
        await (await copy_on_write.view(lower, upper, work, at, uid=agent.UID)).close()
        await asyncio.to_thread(scratch_directory.remove, Path(directory, "work"))


_said: dict[str, object] = {}


def say_once(message: str, about: str | None = None) -> None:
    """Log a warning, unless one with the same text, or `about` the same, was logged before. A text that names a
    sandbox needs `about`."""
    own = object()
    said = _said.setdefault(about or message, own)
    if said is own:  # one thread alone gets its own back: sandboxes come up in several
        log.warning("%s", message)
