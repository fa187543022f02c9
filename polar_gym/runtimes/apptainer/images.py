"""Images as Apptainer runs them: its own files and directories as they are, container images converted once.

A conversion is kept under the image's id. It is made beside its place and renamed into it, so that a conversion in its
place is complete. A lock file lets many processes wait for one conversion. All functions block.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import docker
import requests
from docker import errors

from polar_gym.durable import make_once
from polar_gym.runtimes import SandboxError, agent, tar
from polar_gym.runtimes.glibc import LOADERS
from polar_gym.runtimes.image_names import ARCHIVE, DOCKERFILE
from polar_gym.runtimes.skeleton import skeleton

Form = Literal["directory", "sif"]

CONVERSION_SECONDS = 3600

CONTAINED = ("--containall", "--cleanenv", "--no-home", "--no-privs")
"""Options that give an image's programs nothing of the gateway's machine, environment or rights."""


NOBODY = 65534


def as_nobody() -> tuple[str, ...]:
    """Return the options with which root runs an image's programs without root's rights, such as those to /proc/sys."""
    return ("--security", f"uid:{NOBODY}", "--security", f"gid:{NOBODY}") if os.geteuid() == 0 else ()


FACTS = f"""
cat /etc/passwd
printf '\\0'
cat /etc/group
printf '\\0'
for loader in {" ".join(LOADERS)}; do [ ! -e "$loader" ] || printf yes; done
printf '\\0'
command -v git
printf '\\0'
cat /proc/self/environ
"""

_APPTAINERS_OWN = ("APPTAINER_", "SINGULARITY_", "LD_LIBRARY_PATH=/.singularity.d/", "PROMPT_COMMAND=")
_NOT_THE_IMAGES = ("HOME", "LOGNAME", "OLDPWD", "PS1", "PWD", "SHLVL", "TMPDIR", "USER", "USER_PATH", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that Apptainer can run."""

    name: str
    path: Path
    environment: dict[str, str]
    accounts: dict[str, str]
    """The files of /etc that name users and groups: file name -> text."""
    glibc: bool
    """Whether programs that were built for glibc find their loader in it."""
    git: bool


@dataclass
class Images:
    """The images of one cache."""

    program: str
    cache: Path
    form: Form
    _known: dict[Path, Image] = field(default_factory=dict)

    def get(self, name: str | None) -> Image:
        """Return the image to run, converted if it must be. None: the empty image, for this machine's /usr.

        Raises `SandboxError`.
        """
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            path = self._path(name)
        except OSError as error:
            raise SandboxError(f"runtime.images: {self.cache} cannot be used ({error})") from error
        if path not in self._known:
            self._known[path] = self._look_into(name or "the empty image", path, own_usr=name is not None)
        return self._known[path]

    def read(self, image: Image, directory: str) -> bytes | None:
        """Return a directory of the image as a tar; None where it does not exist. Raises `SandboxError`."""
        script = '[ -d "$1" ] || exit 66; cd "$1" && exec tar -c -f - .'
        done = self._run("exec", *CONTAINED, *as_nobody(), str(image.path), "/bin/sh", "-c", script, "sh", directory)
        if done.returncode == 66:
            return None
        if done.returncode != 0:
            raise SandboxError(f"runtime.image: {directory} of {image.name!r} could not be read: {_said(done)}")
        return done.stdout

    def _path(self, name: str | None) -> Path:
        if name is None:
            return self._skeleton()
        if name.startswith(DOCKERFILE):
            raise SandboxError(f"runtime.image={name!r}: apptainer builds no Dockerfile; set runtime=docker")
        if name.startswith(ARCHIVE):
            archive = Path(name.removeprefix(ARCHIVE))
            return self._converted(_id_in_archive(archive), f"{ARCHIVE}{archive.resolve()}")
        if name.startswith("/"):
            return _own_format(Path(name))
        if "://" in name:
            return self._converted(hashlib.sha256(name.encode()).hexdigest(), name)
        if found := _id_in_daemon(name):
            return self._converted(found, f"docker-daemon:{name if ':' in name else f'{name}:latest'}")
        return self._converted(hashlib.sha256(name.encode()).hexdigest(), f"docker://{name}")

    def _skeleton(self) -> Path:
        content = skeleton()
        with tempfile.TemporaryDirectory(dir=self.cache) as directory:
            with tarfile.open(fileobj=io.BytesIO(content)) as files:
                tar.unpack(files, directory, "fully_trusted")  # our own archive, with a /var/tmp for all
            Path(directory).chmod(0o755)
            return self._converted(hashlib.sha256(content).hexdigest(), directory)

    def _converted(self, key: str, source: str) -> Path:
        target = self.cache / f"{key[:16]}{'.sif' if self.form == 'sif' else ''}"
        make_once(target, partial(self._convert, source))
        return target

    def _convert(self, source: str, scratch: Path) -> Path:
        """Return the converted image, made in `scratch`. Raises `SandboxError`."""
        made = scratch / "image"
        form = ("--sandbox",) if self.form == "directory" else ("--mksquashfs-args", "-comp lz4")
        done = self._run("build", "--disable-cache", *form, str(made), source, scratch=str(scratch))
        if done.returncode != 0:
            raise SandboxError(
                f"runtime.image: {source!r} could not be converted: {_said(done)}; name a SIF file or a sandbox "
                "directory by its absolute path, an archive as docker-archive:/path, an image of the Docker "
                "daemon, or one of a registry that can be reached"
            )
        return made

    def _look_into(self, name: str, path: Path, *, own_usr: bool) -> Image:
        if not own_usr:
            return Image(name=name, path=path, environment=agent.ENVIRONMENT, accounts=agent.ETC, glibc=True, git=True)
        done = self._run("exec", *CONTAINED, *as_nobody(), str(path), "/bin/sh", "-c", FACTS)
        if done.returncode != 0 or done.stdout.count(b"\0") < 4:
            raise SandboxError(f"runtime.image: {name!r} does not run here; it needs /bin/sh and cat: {_said(done)}")
        passwd, group, loader, git, environment = done.stdout.decode(errors="replace").split("\0", 4)
        pairs = (entry.partition("=") for entry in environment.split("\0") if not entry.startswith(_APPTAINERS_OWN))
        known = {variable: value for variable, equals, value in pairs if equals and variable not in _NOT_THE_IMAGES}
        accounts = {"passwd": passwd, "group": group}
        return Image(name=name, path=path, environment=known, accounts=accounts, glibc=bool(loader), git=bool(git))

    def _run(self, *arguments: str, scratch: str | None = None) -> subprocess.CompletedProcess[bytes]:
        with contextlib.ExitStack() as stack:
            own = scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix=".run.", dir=self.cache))
            return subprocess.run(
                [self.program, "--quiet", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=environment(own, self.cache) | _daemon(),
                cwd="/",
                timeout=CONVERSION_SECONDS,
                check=False,
            )


def environment(configuration: str, cache: Path) -> dict[str, str]:
    """Return the whole environment of Apptainer's own commands, which names the places of Apptainer's files."""
    return {
        "PATH": agent.PATH,
        "HOME": configuration,
        "APPTAINER_CONFIGDIR": configuration,
        "APPTAINER_CACHEDIR": str(cache / "layers"),
        "APPTAINER_TMPDIR": configuration,
    }


def _daemon() -> dict[str, str]:
    """Return the variable that names the Docker daemon in which images are looked up by name."""
    host = os.environ.get("DOCKER_HOST")
    return {"DOCKER_HOST": host} if host else {}


def _own_format(path: Path) -> Path:
    if path.is_dir() and not (path / ".singularity.d" / "actions" / "start").exists():
        raise SandboxError(f"runtime.image: {path} is not a sandbox of Apptainer; make one: apptainer build --sandbox")
    if not path.exists():
        raise SandboxError(f"runtime.image: {path} does not exist")
    return path


def _id_in_archive(archive: Path) -> str:
    """Return the id of the image in an archive, which names the file of its configuration by that id."""
    try:
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            assert manifest is not None
            (image, *others) = json.load(manifest)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise SandboxError(f"runtime.image: {archive} is not an archive of docker save: {error}") from error
    if others:
        raise SandboxError(f"runtime.image: {archive} holds {1 + len(others)} images; save one alone")
    return Path(image["Config"]).name.removesuffix(".json")


def _id_in_daemon(name: str) -> str | None:
    """Return the id of an image in the Docker daemon on this machine; None where no daemon has the image."""
    try:
        with contextlib.closing(docker.DockerClient.from_env(timeout=30)) as client:
            found = client.images.get(name).id
    except (errors.DockerException, requests.RequestException):
        return None
    return found.removeprefix("sha256:") if found else None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines: Sequence[str] = done.stderr.decode(errors="replace").strip().splitlines()
    return " ".join(lines[-3:])
