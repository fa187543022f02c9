"""Copy the Python that runs this process, so that the copy runs in a sandbox of any distribution, at any path.

The copy has glibc, glibc's loader and all other libraries of the Python and of its extension modules. Its program is a
script that starts the loader, so that it finds them beside itself: neither the libraries of an image nor a Python there
are asked. The copy's own packages are left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from polar_gym.runtimes.glibc import FAMILY, needed_by

_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "ensurepip",
    "idlelib",
    "turtledemo",
    "tkinter",
    "_tkinter*",
    "config-*",
)

_BESIDE_GLIBC = (*FAMILY, "libgcc_s.so.1", "libstdc++.so.6")
"""Libraries that wheels for Linux expect of every machine (PEP 600) and that programs need; without libraries of
desktops."""

_START = """\
#!/bin/sh
here="${{0%/*}}"
exec "$here/../lib/{loader}" --argv0 "$here/python3" --library-path "$here/../lib" "$here/{program}" "$@"
"""


def copy_into(directory: Path) -> Path:
    """Copy this Python into a directory, where `bin/python3` starts it, and return the directory for its packages.

    Raises `OSError`, or `subprocess.SubprocessError` where the copy does not start.
    """
    program = f"python{sysconfig.get_python_version()}"
    binaries, libraries = directory / "bin", directory / "lib"
    modules = directory / sys.platlibdir / program
    # The attribute has no public name; in a virtual environment it is the path of the Python that made it.
    origin = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        modules,
        ignore=shutil.ignore_patterns(*_LEFT_OUT),
        ignore_dangling_symlinks=True,
    )
    binaries.mkdir()
    shutil.copy(origin, binaries / program)
    needed = {path for each in (origin, *modules.glob("lib-dynload/*.so")) for path in needed_by(each)}
    (glibc,) = (path.parent for path in needed if path.name == "libc.so.6")
    (loader,) = (path for path in needed if path.name.startswith("ld-"))
    needed |= {beside for name in _BESIDE_GLIBC if (beside := glibc / name).exists()}
    libraries.mkdir(exist_ok=True)
    for library in needed:
        shutil.copy(library, libraries / library.name)
    start = binaries / "python3"
    start.write_text(_START.format(loader=loader.name, program=program))
    start.chmod(0o755)
    # Debian's Python has another place for packages than others have.
    ask = [start, "-I", "-c", "import ctypes, ssl, site; print(site.getsitepackages()[-1])"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    packages.mkdir(parents=True, exist_ok=True)
    return packages
