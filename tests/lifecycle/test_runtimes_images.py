"""Any image will do: with nothing in it but busybox, from a daemon, an archive or a file, and wrong ones are named."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.harnesses import HARNESSES, interpreter
from polar_gym.harnesses.install import toolchain_mounts
from polar_gym.paths import cache_dir
from polar_gym.runtimes import HOME, NODEJS, TOOLCHAIN, Command, Mount, SandboxError
from polar_gym.runtimes.docker.daemon import CALL_THREADS
from polar_gym.runtimes.docker.images import BUILT, KEPT
from polar_gym.schema import HarnessSpec, RuntimeSpec, Workspace
from tests.lifecycle.images import BUSYBOX_FILES, archive, imported
from tests.lifecycle.runtime_kinds import MakeRuntime, gateway, make, make_runtime, sh, started
from tests.support import apptainer, sessions
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need_node, need_program

__all__ = ["docker_host", "make_runtime"]

FETCH = """
const http = require("http");
http.get("http://127.0.0.1:8080/", answer => answer.pipe(process.stdout));
"""

with_images = pytest.mark.parametrize("make_runtime", ["docker", "apptainer"], indirect=True)


@pytest.fixture(scope="module")
def busybox(docker_host: str) -> Iterator[str]:
    """An image with a static busybox, a repository of root's, and a variable: no libc, no node, no user of ours."""
    with imported(docker_host, BUSYBOX_FILES, changes=["ENV PATH=/bin", "ENV FROM_IMAGE=yes\\ it\\'s"]) as tag:
        yield tag


class Named:
    """Says images as the runtime at hand takes them: Docker's by their tag, Apptainer's as archives."""

    def __init__(self, make_runtime: MakeRuntime, host: str, directory: Path) -> None:
        self.runtime = make_runtime()
        self._host = host
        self._directory = directory

    def spec(self, tag: str, **values: object) -> RuntimeSpec:
        kind = type(self.runtime).__name__.lower()
        image = tag if kind == "docker" else archive(self._host, tag, self._directory / "image.tar")
        return RuntimeSpec.model_validate({"name": kind, "image": image, **values})


@pytest.fixture
def named(make_runtime: MakeRuntime, docker_host: str, tmp_path: Path) -> Named:
    return Named(make_runtime, docker_host, tmp_path)


def node() -> Mount:
    need_node()
    mounts, _ = toolchain_mounts(HARNESSES.get("pi"), cache_dir())
    return next(mount for mount in mounts if mount.inside == NODEJS)


@with_images
async def test_an_image_keeps_its_variables_and_its_files_become_the_agents(named: Named, busybox: str):
    spec = named.spec(busybox, workspace=Workspace(path="/testbed"))
    async with started(named.runtime, spec=spec) as sandbox:
        script = (
            "echo more >> code.txt; cat code.txt; id -un; echo $FROM_IMAGE ${PATH%%:*} $HOME; pwd; touch ~/x /tmp/x"
        )
        result = await sh(sandbox, script)
    expected = f"of the image\nmore\nagent\nyes it's /bin {HOME}\n/testbed\n"
    assert (result.stdout.decode(), result.stderr) == (expected, b"")
    await named.runtime.close()


async def test_a_harness_finds_programs_where_the_image_has_them(docker_host: str, busybox: str, tmp_path: Path):
    """Only graders did: a harness found no go, cargo or conda of an image, and said nothing."""
    (tmp_path / "work").mkdir()
    workspace = Workspace(source=str(tmp_path / "work"))
    spec = {"name": "docker", "host": docker_host, "image": busybox, "workspace": workspace}
    look = HarnessSpec.model_validate({"name": "command", "command": "echo $PATH"})
    async with sessions.node(tmp_path) as local:
        episode = await local.rollout(sessions.task(runtime=RuntimeSpec.model_validate(spec), agent=look))
    assert episode.artifacts.stdout == f"/bin:{TOOLCHAIN}/bin\n", episode.session.failure


@with_images
async def test_the_toolchains_node_runs_in_an_image_without_any_library(named: Named, busybox: str):
    async with started(
        named.runtime, spec=named.spec(busybox), mounts=[node()], serve=gateway("heard in busybox")
    ) as sandbox:
        result = await sandbox.exec(Command(argv=[NODEJS, "-e", FETCH]))
        assert (result.stdout, result.stderr) == (b"heard in busybox", b"")
        assert (await sh(sandbox, "ls -l /bin/ls | cut -c1")).stdout == b"l\n", "the image's programs are its own"
    await named.runtime.close()


@with_images
async def test_a_toolchains_python_runs_in_an_image_without_any_library(named: Named, busybox: str, tmp_path: Path):
    (tmp_path / "python").mkdir(mode=0o755)
    interpreter.copy_into(tmp_path / "python")
    python = f"{TOOLCHAIN}/python/bin/python3"
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/').read().decode(), end='')"
    mounts = [Mount(tmp_path / "python", f"{TOOLCHAIN}/python")]
    async with started(
        named.runtime, spec=named.spec(busybox), mounts=mounts, serve=gateway("heard by Python")
    ) as sandbox:
        result = await sandbox.exec(Command(argv=[python, "-I", "-c", fetch]))
        assert (result.stdout, result.stderr) == (b"heard by Python", b"")
    await named.runtime.close()


@with_images
async def test_an_image_that_node_does_not_start_in_is_named_before_the_harness_starts(named: Named, docker_host: str):
    """As one whose glibc is older than node's: here its loader is not even a program."""
    files = {**BUSYBOX_FILES, "lib64/ld-linux-x86-64.so.2": "#!/bin/sh\nexit 1\n"}
    with imported(docker_host, files) as tag:
        spec = named.spec(tag)
        with pytest.raises(SandboxError, match=r"runtime\.image: the harness's node does not start in .*glibc"):
            async with started(named.runtime, spec=spec, mounts=[node()]):
                pass
        async with started(named.runtime, spec=spec) as sandbox:
            assert (await sh(sandbox, "echo fine without")).stdout == b"fine without\n"
    await named.runtime.close()


@with_images
async def test_an_image_without_a_shell_is_named(named: Named, docker_host: str):
    with (
        imported(docker_host, {"etc/passwd": ""}, busybox=False) as tag,
        pytest.raises(SandboxError, match=r"runtime\.image: .*/bin/sh"),
    ):
        async with started(named.runtime, spec=named.spec(tag)):
            pass
    await named.runtime.close()


async def test_never_pulls_where_it_is_told_not_to(docker_host: str):
    runtime = make("docker", host=docker_host, pull="never")
    with pytest.raises(SandboxError, match=r"runtime\.pull=missing"):
        async with started(runtime, spec=RuntimeSpec(name="docker", image="registry.invalid/none:1")):
            pass
    await runtime.close()


async def test_an_image_that_cannot_be_pulled_is_named(docker_host: str):
    runtime = make("docker", host=docker_host)
    with pytest.raises(SandboxError, match=r"'registry\.invalid/none:1' could not be pulled.*docker pull"):
        await runtime.prepare(["registry.invalid/none:1"])
    await runtime.close()


async def test_sessions_that_wait_for_an_image_leave_the_daemon_to_those_that_run(docker_host: str):
    """As many as the daemon has threads held all of them: no command of another session began, and none was killed."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def registry(request: web.Request) -> web.Response:
        if request.path != "/v2/":  # whether a registry is here at all
            asked.set()
            await answer.wait()
            raise web.HTTPNotFound
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.*}", registry)
    runtime = make("docker", host=docker_host)
    async with TestServer(app, host="127.0.0.1") as server, started(runtime) as sandbox:
        image = f"127.0.0.1:{server.port}/slow:1"
        waiting = [asyncio.create_task(runtime.prepare([image])) for _ in range(CALL_THREADS)]
        await asked.wait()
        assert (await sh(sandbox, "echo here")).stdout == b"here\n"
        assert not any(task.done() for task in waiting)
        answer.set()
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert "could not be pulled" in str(ended)
    await runtime.close()


async def test_always_asks_the_registry_even_for_what_is_there(docker_host: str, busybox: str):
    """And `missing` does not: no registry knows these images."""
    present, always = (make("docker", host=docker_host, pull=policy) for policy in ("missing", "always"))
    await present.prepare([busybox])
    with pytest.raises(SandboxError, match="could not be pulled"):
        await always.prepare([busybox])
    await present.close()
    await always.close()


@pytest.mark.parametrize("repository", [BUILT, KEPT])
async def test_always_asks_no_registry_for_what_was_made_here(docker_host: str, busybox: str, repository: str):
    """No registry has it: directories with a Dockerfile could not be used, and no work of theirs be graded."""
    runtime = make("docker", host=docker_host, pull="always")
    with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
        client.images.get(busybox).tag(repository, tag="here")
        try:
            await runtime.prepare([f"{repository}:here"])
        finally:
            client.images.remove(f"{repository}:here")
    await runtime.close()


@pytest.fixture
def program() -> str:
    return apptainer.program()


async def test_apptainer_converts_an_image_once(docker_host: str, busybox: str, program: str, tmp_path: Path):
    """Known by its id, wherever it comes from; also in two runs at once."""
    first, second = (make("apptainer", program=program, images=tmp_path / "images") for _ in range(2))
    saved = [archive(docker_host, busybox, tmp_path / name) for name in ("a.tar", "b.tar")]
    await first.prepare([saved[0]])
    (converted,) = (path for path in (tmp_path / "images").iterdir() if path.is_dir())
    made = converted.stat().st_ino
    await second.prepare([saved[1]])
    (converted,) = (path for path in (tmp_path / "images").iterdir() if path.is_dir())
    assert converted.stat().st_ino == made
    async with started(second, spec=RuntimeSpec(name="apptainer", image=str(converted))) as sandbox:
        assert (await sh(sandbox, "echo $FROM_IMAGE")).stdout == b"yes it's\n"
    with pytest.raises(SandboxError, match=r"not a sandbox of Apptainer"):
        await first.prepare([str(tmp_path)])


async def test_the_images_start_script_does_not_run_as_the_machines_root(
    docker_host: str, busybox: str, program: str, tmp_path: Path
):
    """It ran as uid 0 without a user namespace, and could write to /proc/sys."""
    image = archive(docker_host, busybox, tmp_path / "image.tar")
    runtime = make("apptainer", program=program, images=tmp_path / "images")
    async with started(runtime, spec=RuntimeSpec(name="apptainer", image=image)) as sandbox:
        assert (await sh(sandbox, "busybox stat -c %u /proc/1")).stdout.strip() not in (b"", b"0")


async def test_apptainer_is_found_outside_of_the_standard_directories(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`doctor` found the program, and the first conversion did not."""
    monkeypatch.setenv("PATH", f"{Path(program).parent}:{os.environ['PATH']}")
    runtime = make("apptainer", images=tmp_path / "images")
    assert runtime.check() == []
    async with started(runtime) as sandbox:
        assert (await sh(sandbox, "echo here")).stdout == b"here\n"


async def test_apptainer_runs_sif_files(docker_host: str, busybox: str, program: str, tmp_path: Path):
    need_program("mksquashfs", "apt-get install squashfs-tools")
    maker = make("apptainer", program=program, images=tmp_path / "images", form="sif")
    await maker.prepare([archive(docker_host, busybox, tmp_path / "image.tar")])
    (sif,) = (tmp_path / "images").glob("*.sif")
    spec = RuntimeSpec(name="apptainer", image=str(sif), workspace=Workspace(path="/testbed"))
    async with started(make("apptainer", program=program), spec=spec) as sandbox:
        assert (await sh(sandbox, "echo more >> code.txt; cat code.txt")).stdout == b"of the image\nmore\n"


async def test_apptainer_finds_images_of_the_docker_daemon(
    docker_host: str, busybox: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    runtime = make("apptainer", program=program, images=tmp_path / "images")
    async with started(runtime, spec=RuntimeSpec(name="apptainer", image=busybox)) as sandbox:
        assert (await sh(sandbox, "echo $FROM_IMAGE")).stdout == b"yes it's\n"


async def test_an_absent_apptainer_is_named_with_the_way_to_get_one():
    (message,) = make("apptainer", program="/nowhere/apptainer").check()
    assert "/nowhere/apptainer is missing" in message
    assert "runtime.program" in message
