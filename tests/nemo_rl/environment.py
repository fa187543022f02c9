"""The environment of the tests with NeMo RL's real code, in `$POLAR_GYM_CACHE/nemo-rl/venv`.

    python -m tests.nemo_rl.environment CHECKOUT [ARGUMENT]...    # pytest's, or one of these words:
    record    write the rows that NeMo RL trains (`record`)
    keys      write the keys that its configs may have (`known_keys`)
    law       compare its gradients with those of whole sessions (`make show-law`)

CHECKOUT is a checkout of NeMo RL, which is not installed. torch and the rest come from the environment of vLLM (`make
vllm`), by a path file: NeMo RL's own installation needs CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.vllm_server import CHECKOUT, cache_directory, vllm_python

REQUIREMENTS = (
    *("ray>=2.55.1", "transformers>=5.5,<5.9", "tensordict", "torchdata", "math-verify", "nvidia-ml-py"),
    *("mlflow", "soundfile", "swanlab", "tensorboard", "wandb"),
)
PINNED = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
"""The commit of NeMo RL that the recorded rows are of."""


def install() -> Path:
    """Return the interpreter of the environment, which is made at the first call."""
    base = vllm_python()
    if base is None:
        sys.exit("vLLM's environment is missing: make vllm")
    return install_beside(base, "venv", REQUIREMENTS)


def install_beside(base: Path, name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment with the requirements, and with all packages of the one of `base`."""
    directory = cache_directory() / "nemo-rl" / name
    python, complete = directory / "bin" / "python", directory / "complete"
    if complete.exists() and complete.read_text(encoding="utf-8") == "\n".join(requirements):
        return python
    subprocess.run([base, "-m", "venv", "--clear", directory], check=True)
    show = "import sys; print(*[path for path in sys.path if path.endswith('site-packages')], sep='\\n')"
    theirs, own = (
        subprocess.run([each, "-c", show], capture_output=True, text=True, check=True).stdout for each in (base, python)
    )
    (Path(own.strip()) / "base.pth").write_text(theirs, encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    complete.write_text("\n".join(requirements), encoding="utf-8")
    return python


def check(checkout: Path) -> None:
    """Exit unless this is a checkout of NeMo RL; say so where it is of another commit."""
    if not (checkout / "nemo_rl" / "algorithms" / "grpo.py").exists():
        sys.exit(f"NEMO_RL={checkout}: is no checkout of NeMo RL (github.com/NVIDIA-NeMo/RL, commit {PINNED})")
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.stdout.strip() != PINNED:
        print(f"NEMO_RL={checkout} is not at {PINNED}, with which these tests were written")  # noqa: T201


def variables(checkout: Path) -> dict[str, str]:
    """Return the environment variables with which NeMo RL's code runs from its checkout."""
    return os.environ | {
        "PYTHONPATH": f"{CHECKOUT}:{checkout}",
        "NEMO_RL": str(checkout),
        "POLAR_DATA": "/data",
        "CUDA_VISIBLE_DEVICES": "",
    }


def main(checkout: Path, arguments: list[str]) -> int:
    check(checkout)
    python = install()
    match arguments:
        case ["record"]:
            program = ["tests.nemo_rl.record"]
        case ["keys"]:
            program = ["tests.nemo_rl.known_keys"]
        case ["law", *options]:
            program = ["tests.show.law", *options]
        case _:
            program = ["pytest", "tests/nemo_rl", *arguments]
    return subprocess.run([python, "-m", *program], env=variables(checkout), cwd=CHECKOUT, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: make nemo-rl NEMO_RL=DIRECTORY, a checkout of NeMo RL")
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
