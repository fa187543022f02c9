"""Installing a package with the real npm, from a registry on loopback that offers one small package."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp import web

from polar_gym.harnesses import Harness, Launch
from polar_gym.harnesses.install import InstallError, install, missing, place, toolchain_mounts
from tests.support.requirements import need_program

TINY = Harness(
    npm_package="@tiny/harness", version="1.2.3", script="bin/tiny.js", launch=lambda context: Launch(argv=[])
)
PLACE = "harnesses/tiny-harness-1.2.3/node_modules"


@dataclass
class NpmRegistry:
    url: str
    downloads: int = 0


def _tarball() -> bytes:
    """The package; its install script would leave a mark, if scripts were run."""
    manifest = {"name": TINY.npm_package, "version": TINY.version, "bin": {"tiny": TINY.script}}
    manifest["scripts"] = {"install": "touch ran-a-script"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in (("package.json", json.dumps(manifest)), (TINY.script, "console.log('hello')\n")):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.fixture
async def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NpmRegistry]:
    need_program("npm", "apt-get install nodejs npm")
    tarball = _tarball()
    served = NpmRegistry("")

    async def handle(http: web.Request) -> web.Response:
        if http.path == "/tiny.tgz":
            served.downloads += 1
            return web.Response(body=tarball)
        if http.path.lower() != "/@tiny/harness":
            return web.json_response({"error": "not found"}, status=404)
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
        dist = {"tarball": f"{served.url}/tiny.tgz", "integrity": integrity}
        version = {"name": TINY.npm_package, "version": TINY.version, "dist": dist, "hasInstallScript": True}
        latest = {"latest": TINY.version}
        return web.json_response({"name": TINY.npm_package, "dist-tags": latest, "versions": {TINY.version: version}})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setenv("npm_config_registry", served.url)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    yield served
    await runner.cleanup()


async def test_a_package_is_installed_whole_and_once(registry: NpmRegistry, tmp_path: Path):
    cache = tmp_path / "cache"
    leftover = cache / "harnesses" / ".tiny-harness-1.2.3~killed"
    leftover.mkdir(parents=True)
    modules = await asyncio.to_thread(install, TINY, cache)
    assert modules == cache / PLACE
    package = modules / "@tiny" / "harness"
    assert (package / TINY.script).read_text() == "console.log('hello')\n"
    assert not (package / "ran-a-script").exists()
    assert not leftover.exists()
    assert await asyncio.to_thread(install, TINY, cache) == modules
    assert registry.downloads == 1


async def test_many_processes_install_once(registry: NpmRegistry, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from polar_gym.harnesses import Harness; "
        "from polar_gym.harnesses.install import install; "
        "tiny = Harness(npm_package='@tiny/harness', version='1.2.3', script='bin/tiny.js', launch=print); "
        "print(install(tiny, Path(sys.argv[1])))"
    )
    starts = (
        asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE)
        for _ in range(3)
    )
    processes = await asyncio.gather(*starts)
    outputs = [(await process.communicate())[0].decode().strip() for process in processes]
    assert outputs == [str(tmp_path / PLACE)] * 3
    assert registry.downloads == 1


async def test_a_failure_says_why_and_leaves_nothing(registry: NpmRegistry, tmp_path: Path):
    message = r"npm install @tiny/harness@9\.9\.9 failed \(exit code 1\):\n(.*\n)*.*ETARGET"
    with pytest.raises(InstallError, match=message):
        await asyncio.to_thread(install, replace(TINY, version="9.9.9"), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "harnesses").iterdir()] == [".lock"]


async def test_a_script_that_the_package_lacks_is_named_also_where_it_is_installed(
    registry: NpmRegistry, tmp_path: Path
):
    """Guards against a harness file that is wrong after a right one had installed the package: its session failed."""
    message = r"@tiny/harness@1\.2\.3 has no @tiny/harness/bin/gone\.js: mend script='bin/gone\.js'; .*: bin/tiny\.js$"
    wrong = replace(TINY, script="bin/gone.js")
    with pytest.raises(InstallError, match=message):
        await asyncio.to_thread(install, wrong, tmp_path)
    await asyncio.to_thread(install, TINY, tmp_path)
    with pytest.raises(InstallError, match=message):
        await asyncio.to_thread(install, wrong, tmp_path)
    assert registry.downloads == 1


@pytest.mark.parametrize("version", ["", "latest", "^1.2.0"])
def test_a_harness_without_one_version_is_not_installed(version: str, tmp_path: Path) -> None:
    """Guards against the newest version of today, kept in the cache for good as if it were pinned."""
    with pytest.raises(InstallError, match=re.escape(f"version={version!r}: name one version of @tiny/harness, such")):
        install(replace(TINY, version=version), tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_the_mounts_and_the_argv_fit_together(registry: NpmRegistry, tmp_path: Path):
    need_program("node", "apt-get install nodejs npm")
    mounts, argv = await asyncio.to_thread(toolchain_mounts, TINY, tmp_path)
    inside = "/opt/polar-gym/tiny-harness"
    assert argv == ["/opt/polar-gym/bin/node", f"{inside}/node_modules/@tiny/harness/bin/tiny.js"]
    hosts = {mount.inside: mount.host for mount in mounts}
    assert set(hosts) - {"/opt/polar-gym/bin/rg"} == {inside, "/opt/polar-gym/bin/node"}
    assert ("/opt/polar-gym/bin/rg" in hosts) == (shutil.which("rg") is not None)
    on_host = [str(hosts[argv[0]]), argv[1].replace(inside, str(hosts[inside]))]
    done = await asyncio.to_thread(subprocess.run, on_host, capture_output=True, text=True, timeout=30)
    assert done.stdout == "hello\n", done.stderr


async def test_a_native_program_is_started_without_node(registry: NpmRegistry, tmp_path: Path):
    native = replace(TINY, native_programs={platform.machine(): "@tiny/harness/bin/tiny.js"})
    mounts, argv = await asyncio.to_thread(toolchain_mounts, native, tmp_path)
    assert argv == ["/opt/polar-gym/tiny-harness/node_modules/@tiny/harness/bin/tiny.js"]
    assert "/opt/polar-gym/bin/node" not in [mount.inside for mount in mounts]


async def test_a_machine_without_a_native_program_is_named(registry: NpmRegistry, tmp_path: Path):
    native = replace(TINY, native_programs={"pdp11": "@tiny/harness-pdp11/tiny"})
    with pytest.raises(InstallError, match=f"none is built for {platform.machine()}: pdp11"):
        await asyncio.to_thread(toolchain_mounts, native, tmp_path)


@contextlib.contextmanager
def _path_with(directory: Path, *programs: tuple[str, str]) -> Iterator[str]:
    directory.mkdir()
    for name, text in programs:
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    yield str(directory)


@pytest.mark.parametrize(
    ("programs", "messages"),
    [
        ((), ["node is not on PATH; install Node.js 20", "npm is not on PATH; install it"]),
        (
            (("node", "#!/bin/sh\necho 18.19.0 /usr/bin/node\n"),),
            ["version 18.19.0, too old; install", "npm is not on"],
        ),
        ((("node", "#!/bin/sh\necho oh no >&2\nexit 3\n"),), ["does not run (exit code 3): oh no", "npm is not on"]),
    ],
)
def test_what_is_missing_is_named_with_its_cure(
    programs: tuple[tuple[str, str], ...], messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with _path_with(tmp_path / "bin", *programs) as path:
        monkeypatch.setitem(os.environ, "PATH", path)
        monkeypatch.setattr(sys, "executable", f"{path}/python")  # this Python's environment may hold node
        lacking = missing()
    assert [message in text for message, text in zip(messages, lacking, strict=True)] == [True, True], lacking


def test_other_pins_are_another_installation(tmp_path: Path) -> None:
    """Guards against an installation with other packages than those that a run notes as pinned."""
    pinned = [
        replace(TINY, npm_package=None, pypi_package="tiny", pypi_pins=pins) for pins in ((), ("a==1",), ("a==2",))
    ]
    assert len({place(each, tmp_path) for each in pinned}) == 3
