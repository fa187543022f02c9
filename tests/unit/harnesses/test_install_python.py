"""Installing a package of PyPI with the real pip, from an index on loopback that offers one small wheel."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp import web

from polar_gym.harnesses import Harness, Launch
from polar_gym.harnesses.install import InstallError, install, toolchain_mounts
from tests.support.files import closed

TINY = Harness(pypi_package="tiny-agent", version="1.2.3", script="tiny", launch=lambda context: Launch(argv=[]))
SAYS = """\
import ssl, sys
def main():
    print("hello", *sys.argv[1:])
    print(sys.executable, ssl.__file__, __file__, sep="\\n")
"""


RUNS_ON = re.escape(platform.python_version())
LATER = "tiny_agent-3.0-py3-none-any.whl"


@dataclass
class Index:
    downloads: int = 0


def wheel() -> bytes:
    about = "tiny_agent-1.2.3.dist-info"
    files = {
        "tiny_agent.py": SAYS,
        "left_behind.pth": "import os, sys; os.environ.get('MARK') and open(os.environ['MARK'], 'w')\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-agent\nVersion: 1.2.3\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\ntiny = tiny_agent:main\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
async def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Index]:
    data, served = wheel(), Index()
    name = "tiny_agent-1.2.3-py3-none-any.whl"
    digest = hashlib.sha256(data).hexdigest()

    async def handle(http: web.Request) -> web.Response:
        if http.path == "/simple/tiny-agent/":
            links = {f"/{name}#sha256={digest}": name, "/tiny_agent-2.0.tar.gz": "tiny_agent-2.0.tar.gz"}
            text = "".join(f'<a href="{link}">{file}</a>' for link, file in links.items())
            text += f'<a href="/{LATER}" data-requires-python="&gt;=4.1">{LATER}</a>'
            return web.Response(text=text, content_type="text/html")
        served.downloads += http.path == f"/{name}"
        return web.Response(body=data) if http.path == f"/{name}" else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{runner.addresses[0][1]}/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    yield served
    await runner.cleanup()


async def test_it_runs_wherever_it_lies_and_needs_nothing_of_the_machine(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a program that the agent's own environment leads astray."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))
    mounts, argv = await asyncio.to_thread(toolchain_mounts, TINY, tmp_path / "cache")
    assert argv == ["/opt/polar-gym/tiny-agent/bin/tiny"]
    assert not mark.exists(), "no code of the package ran"
    (mount,) = [mount for mount in mounts if mount.inside == "/opt/polar-gym/tiny-agent"]
    place = tmp_path / "elsewhere" / "tiny"
    shutil.copytree(mount.host, place)
    await asyncio.to_thread(shutil.rmtree, mount.host)
    environment = {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere", "LD_LIBRARY_PATH": "/nowhere"}
    program = [place / "bin" / "tiny", "--x", "a b"]
    done = await asyncio.to_thread(
        subprocess.run, program, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said, executable, *files = done.stdout.splitlines()
    assert said == "hello --x a b"
    assert Path(executable) == place / "bin" / "python3"
    assert all(Path(file).is_relative_to(place) for file in files)
    libraries = {path.name for path in (place / "lib").iterdir()}
    assert {"libc.so.6", "libstdc++.so.6"} <= libraries


async def test_the_agent_may_read_it_whatever_the_umask(index: Index, tmp_path: Path) -> None:
    """Guards against a harness that root's agents could not start, for no other user could read it."""
    before = os.umask(0o077)
    try:
        programs = await asyncio.to_thread(install, TINY, tmp_path / "cache")
    finally:
        os.umask(before)
    assert closed(programs.parent) == []


async def test_it_is_installed_once_by_many(index: Index, tmp_path: Path) -> None:
    leftover = tmp_path / "harnesses" / ".tiny-agent-1.2.3~killed"
    leftover.mkdir(parents=True)
    places = await asyncio.gather(*(asyncio.to_thread(install, TINY, tmp_path) for _ in range(3)))
    assert places == [tmp_path / "harnesses/tiny-agent-1.2.3/bin"] * 3
    assert index.downloads == 1
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        (replace(TINY, version="9.9.9"), r"pip install tiny-agent==9\.9\.9 failed \(exit code 1\):\n(.*\n)*.*No match"),
        (
            replace(TINY, version="3.0"),
            rf"\npolar-gym runs on Python {RUNS_ON}; other versions: >=4\.1$",
        ),
        (replace(TINY, version="2.0"), r"pip install tiny-agent==2\.0 failed \(exit code 1\)"),  # a source only
    ],
)
async def test_a_failure_says_why_and_leaves_nothing(harness: Harness, message: str, index: Index, tmp_path: Path):
    with pytest.raises(InstallError, match=message):
        await asyncio.to_thread(install, harness, tmp_path)
    assert [path.suffix for path in (tmp_path / "harnesses").iterdir()] == [".lock"]


async def test_a_script_that_the_package_lacks_is_named_also_where_it_is_installed(index: Index, tmp_path: Path):
    await asyncio.to_thread(install, TINY, tmp_path)
    with pytest.raises(InstallError, match=r"1\.2\.3 has no gone: mend script='gone'; programs of the package: tiny$"):
        await asyncio.to_thread(install, replace(TINY, script="gone"), tmp_path)


def test_a_python_without_pip_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match=f"{sys.executable} has no pip; install it: .* ensurepip, or put uv on PATH"):
        install(TINY, tmp_path)


async def test_setuptools_can_be_imported_after_an_installation(index: Index, tmp_path: Path) -> None:
    """Guards against a search for pip after which no process of Python 3.11 could import vLLM or TRL."""
    code = "import setuptools, distutils; print(distutils.__file__)"
    code = f"from tests.unit.harnesses.test_install_python import *; install(TINY, Path({str(tmp_path)!r})); {code}"
    ran = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "setuptools/_distutils" in ran.stdout, ran.stderr
