"""Builds images from directories with a Dockerfile: each content once, however many sessions ask for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from polar_gym.durable import locked
from polar_gym.paths import cache_dir
from polar_gym.runtimes import SandboxError, files
from polar_gym.runtimes.docker.images import BUILT

LAST_LINES = 5

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build(host: str, directory: Path, *, arguments: Mapping[str, str], network: str, seconds: float) -> str:
    """Return the tag of the image of a directory, built where the daemon does not have it. Raises `SandboxError`.

    The tag is a hash of the directory and of the build's arguments, not of the image in `FROM`.
    """
    if shutil.which("docker") is None:
        raise SandboxError(
            "the program docker is missing, which builds images; install it with: apt-get install docker.io"
        )
    if not (directory / "Dockerfile").is_file():
        raise SandboxError(f"runtime.image: {directory} has no Dockerfile; write one, or name another directory")
    digest = files.digest(directory, sorted(arguments.items()))
    tag = f"{BUILT}:{digest}"
    locks = cache_dir() / "builds"
    locks.mkdir(parents=True, exist_ok=True)
    docker = ("docker", "--host", host)
    given = (part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}"))
    with locked(locks / f"{digest}.lock"):
        if subprocess.run([*docker, "image", "inspect", tag], capture_output=True, check=False).returncode == 0:
            return tag
        command = [*docker, "build", "--force-rm", "--network", network, "--tag", tag, *given, str(directory)]
        try:
            built = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(_problem(directory, f"is not done within {seconds:g} s", error.output)) from error
    if built.returncode != 0:
        raise SandboxError(_problem(directory, f"exited with {built.returncode}", built.stdout))
    return tag


def _problem(directory: Path, ending: str, output: bytes | None) -> str:
    text = _COLOUR.sub("", (output or b"").decode(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " | ".join(lines[-LAST_LINES:]) or "it said nothing"
    return f"runtime.image: docker build {directory} {ending}: {said}"
