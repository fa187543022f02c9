"""A small image that looks like those of SWE-bench: `/testbed` with a git repository, and an environment `testbed`.

Made of this machine's own bash, git and Python, with a stand-in for conda's `activate`, which runs a Python program as
conda's does.
"""

import contextlib
import io
import re
import subprocess
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker

from polar_gym.paths import cache_dir
from polar_gym.workspaces.venv import INTERPRETER, ensure_venv
from tests.lifecycle.images import BUSYBOX
from tests.support.requirements import need

CONDA = "opt/miniconda3"
ACTIVATE = f'conda() {{ eval "$(/{CONDA}/bin/conda shell.posix "$@")"; }}\n'
ACTIVATED = f"""\
#!/{CONDA}/envs/testbed/bin/python
import sys
print(f'export CONDA_DEFAULT_ENV={{sys.argv[-1]}} PATH="/{CONDA}/envs/{{sys.argv[-1]}}/bin:$PATH"')
"""
PYTEST = f"""\
#!/{CONDA}/envs/testbed/bin/python
import sys
from pytest import console_main
sys.exit(console_main())
"""
_LEFT_OUT = re.compile(r"/(__pycache__|test|idlelib|lib2to3|ensurepip|config-[^/]*|pip|setuptools)(/|$)")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    f"{CONDA}/bin/activate": ACTIVATE,
    f"{CONDA}/bin/conda": ACTIVATED,
    f"{CONDA}/envs/testbed/bin/pytest": PYTEST,
    f"{CONDA}/envs/testbed/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\n",
}


@contextlib.contextmanager
def image_with_testbed(
    host: str,
    repository: Path,
    requirements: Sequence[str] = ("pytest<9",),
    tag: str | None = None,
    installed: Path | None = None,
) -> Iterator[str]:
    """An image with this git repository at `/testbed`, whose modules can be imported; its tag, by default a new one.

    `installed`: the environment has a copy of the packages in this directory, as after `pip install .`. Otherwise it
    has the repository, as after `pip install -e .`.
    """
    need(BUSYBOX.exists(), "a static busybox", "apt-get install busybox-static")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("sbin", "usr/bin")):
            _link(tar, name, target)
        _add_programs(tar, requirements, installed)
        for path, text in _FILES.items():
            _write(tar, path, text)
        for name in ("root", "tmp", "var/tmp"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        tar.add(repository, "testbed")
    tag = tag or f"polar-gym/test:{uuid.uuid4().hex}"
    name, _, version = tag.rpartition(":")
    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        client.api.import_image_from_data(
            buffer.getvalue(), repository=name, tag=version, changes=["ENV PATH=/usr/bin:/bin"]
        )
        try:
            yield tag
        finally:
            client.images.remove(tag, force=True)


def _add_programs(tar: tarfile.TarFile, requirements: Sequence[str], installed: Path | None) -> None:
    """bash, git and Python with its library and packages, all that they are linked with, and busybox for the rest."""
    python = Path(INTERPRETER).resolve()
    library = Path(
        subprocess.check_output([python, "-c", "import os; print(os.path.dirname(os.__file__))"], text=True)[:-1]
    )
    site = f"{CONDA}/envs/testbed/lib/{library.name}/site-packages"
    programs = [Path("/usr/bin/bash"), Path("/usr/bin/git"), python]
    linked = subprocess.run(
        ["ldd", *programs, *library.glob("lib-dynload/*.so")], capture_output=True, text=True, check=True
    ).stdout
    for path in {*programs, *map(Path, re.findall(r"(?:=> |^\t)(/\S+) \(", linked, re.MULTILINE))}:
        name = str(path) if str(path).startswith("/usr/") else f"/usr{path}"
        tar.add(path.resolve(), name.lstrip("/"))
    tar.add(library, str(library).lstrip("/"), filter=_wanted)
    venv = ensure_venv(list(requirements), cache_dir())
    tar.add(venv / "lib" / library.name / "site-packages", site, filter=_wanted)
    if installed is None:
        _write(tar, f"{site}/testbed.pth", "/testbed\n/testbed/src\n")
    for package in installed.iterdir() if installed else ():
        tar.add(package, f"{site}/{package.name}")
    for name in (f"{CONDA}/envs/testbed/bin/python", "usr/bin/python3"):
        _link(tar, name, str(python))
    tar.add(BUSYBOX, "usr/bin/busybox")
    for command in subprocess.check_output([BUSYBOX, "--list"], text=True).split():
        if command not in ("busybox", "bash"):
            _link(tar, f"usr/bin/{command}", "busybox")


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT.search(f"/{entry.name}") else entry


def _write(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), 0o755
    tar.addfile(entry, io.BytesIO(text.encode()))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
