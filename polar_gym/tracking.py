"""Sends the figures of a run to Weights & Biases, MLflow or TensorBoard, by their own clients.

Projects, servers and keys are the clients' own settings, in the environment: `WANDB_PROJECT`, `WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`. What a run is worth is in its files: a client that fails later costs a
warning, and never the run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from polar_gym.console import errors
from polar_gym.errors import ConfigError, how_to_install

Where = Literal["none", "wandb", "mlflow", "tensorboard"]
Log = Callable[[Mapping[str, Any], int], None]
"""Takes figures and their step. Values that are no numbers are left out."""

MODULES = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboardX"}


def check_installed(where: Where) -> None:
    """Raise `ConfigError` where the client is missing."""
    if where != "none" and importlib.util.find_spec(MODULES[where]) is None:
        raise ConfigError(f"rollout.metrics={where}: {MODULES[where]} is missing; install: {how_to_install(where)}")


@contextmanager
def tracked(where: Where, name: str, directory: Path, parameters: Mapping[str, Any]) -> Iterator[Log]:
    """Open a run of the tracker, and yield the function that logs to it. TensorBoard's files go to `directory`.

    Raises `ConfigError` where the run cannot be opened.
    """
    if where == "none":
        yield lambda figures, step: None
        return
    try:
        send, close = OPEN[where](name, directory, parameters)
    except Exception as error:
        raise ConfigError(f"rollout.metrics={where}: {type(error).__name__}: {error}") from error

    def attempt(action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 (the run is worth more than its curve)
            errors.print(f"{where}: {type(error).__name__}: {error}", markup=False, style="yellow")

    def log(figures: Mapping[str, Any], step: int) -> None:
        numbers = {key: float(value) for key, value in figures.items() if isinstance(value, int | float)}
        attempt(send, numbers, step)

    try:
        yield log
    finally:
        attempt(close)


def _wandb(name: str, directory: Path, parameters: Mapping[str, Any]) -> tuple[Log, Callable[[], object]]:
    directory.mkdir(parents=True, exist_ok=True)
    client: Any = importlib.import_module("wandb")
    run = client.init(name=name, dir=str(directory), config=dict(parameters))
    return lambda figures, step: run.log(figures, step=step), run.finish


def _mlflow(name: str, directory: Path, parameters: Mapping[str, Any]) -> tuple[Log, Callable[[], object]]:
    client: Any = importlib.import_module("mlflow")
    run = client.start_run(run_name=name)
    client.log_params(dict(parameters))
    return lambda figures, step: client.log_metrics(figures, step=step, run_id=run.info.run_id), client.end_run


def _tensorboard(name: str, directory: Path, parameters: Mapping[str, Any]) -> tuple[Log, Callable[[], object]]:
    client: Any = importlib.import_module("tensorboardX")
    writer = client.SummaryWriter(str(directory / "tensorboard" / name))
    writer.add_text("parameters", "\n".join(f"- {key}: {value}" for key, value in parameters.items()))

    def send(figures: Mapping[str, Any], step: int) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return send, writer.close


OPEN = {"wandb": _wandb, "mlflow": _mlflow, "tensorboard": _tensorboard}
