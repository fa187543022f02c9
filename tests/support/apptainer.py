"""Apptainer for tests: the machine's own, else Debian's newest unpacked into polar-gym's cache.

Debian 12 and 13 do not package it, and its package in unstable asks for a newer libc than theirs. So it is unpacked
with a libc of its own beside it, which its two programs are told to use; the rest of the machine stays as it is. Run

    python -m tests.support.apptainer install
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polar_gym.durable import make_once
from polar_gym.paths import cache_dir
from tests.support.requirements import need

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PROGRAMS = {"patchelf": "patchelf", "unsquashfs": "squashfs-tools", "squashfuse": "squashfuse", "newuidmap": "uidmap"}
"""Programs that it takes, and their packages."""
OWN_LIBRARIES = ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "libresolv.so.2")
MULTIARCH = "lib/x86_64-linux-gnu"
BINARIES = ("bin/apptainer", f"{MULTIARCH}/apptainer/bin/starter")
SETTINGS = {
    "root default capabilities = full": "root default capabilities = no",
    "systemd cgroups = yes": "systemd cgroups = no",
}


def program() -> str:
    """The program to test with; skips or fails the test where there can be none."""
    if found := shutil.which("apptainer"):
        return found
    place = cache_dir() / "apptainer"
    if not (place / "bin" / "apptainer").exists():
        lacking = [package for name, package in PROGRAMS.items() if not shutil.which(name)]
        need(not lacking, "apptainer", f"apt-get install {' '.join(lacking)}")
        need(shutil.which("apt-get") and Path(KEYRING).exists(), "apptainer", "your distribution's package")
        need(platform.machine() == "x86_64", "apptainer for this machine", "your distribution's package")
        install(place)
    return str(place / "bin" / "apptainer")


def install(place: Path) -> None:
    """Unpack it at `place`, once, whoever else does the same."""
    place.parent.mkdir(parents=True, exist_ok=True)
    make_once(place, partial(_installed, place=place))


def _installed(scratch: Path, place: Path) -> Path:
    unpacked, made = scratch / "unpacked", scratch / "made"
    _unpack(scratch, unpacked)
    _arrange(unpacked, made)
    _patch(made, place)
    return made


def copy(program: str, place: Path) -> str:
    """A copy at `place`, where another user may run it; the program there."""
    shutil.copytree(Path(program).resolve().parents[1], place, symlinks=True)
    _patch(place, place)
    return str(place / "bin" / "apptainer")


def _unpack(scratch: Path, unpacked: Path) -> None:
    """Debian's newest packages, by apt with lists of its own."""
    mirror = _run(["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]).splitlines()[0]
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (scratch / name).mkdir(parents=True)
    sources = scratch / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} sid main\n")
    options = {
        **{"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "/dev/null"},
        **{"Dir::State::lists": scratch / "lists", "Dir::Cache": scratch / "cache"},
        **{"APT::Sandbox::User": "", "Acquire::Languages": "none"},
    }
    apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    _run([*apt, "update"])
    _run([*apt, "download", "apptainer", "libc6"], cwd=scratch / "packages")
    for package in (scratch / "packages").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(unpacked)])


def _arrange(unpacked: Path, made: Path) -> None:
    libraries = unpacked / "usr" / MULTIARCH
    (made / "glibc").mkdir(parents=True)
    for name in OWN_LIBRARIES:
        shutil.copy(libraries / name, made / "glibc" / name)
    shutil.copytree(unpacked / "usr" / "bin", made / "bin", symlinks=True)
    shutil.copytree(unpacked / "etc", made / "etc", symlinks=True)
    shutil.copytree(libraries / "apptainer", made / MULTIARCH / "apptainer", symlinks=True)
    (made / "var" / "lib" / "apptainer" / "mnt" / "session").mkdir(parents=True)
    for name in ("etc", "var"):  # its starter looks beside the folder of its architecture
        (made / "lib" / name).symlink_to(f"../{name}")
    configuration = made / "etc" / "apptainer" / "apptainer.conf"
    text = configuration.read_text()
    for before, after in SETTINGS.items():
        assert before in text, f"Apptainer's configuration has changed: no {before!r}"
        text = text.replace(before, after)
    configuration.write_text(text)
    made.chmod(0o755)


def _patch(where: Path, final: Path) -> None:
    """Point the programs at the libc that lies beside them, once they are at `final`."""
    for binary in BINARIES:
        _run(["patchelf", "--set-interpreter", f"{final}/glibc/ld-linux-x86-64.so.2", str(where / binary)])
        # Not RUNPATH: Apptainer sets LD_LIBRARY_PATH for its helpers.
        _run(["patchelf", "--force-rpath", "--set-rpath", f"{final}/glibc:/{MULTIARCH}", str(where / binary)])


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0, f"{' '.join(command)} failed: {done.stderr}"
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(f"usage: {sys.executable} -m tests.support.apptainer install")
    install(cache_dir() / "apptainer")
