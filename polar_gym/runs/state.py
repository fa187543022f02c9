"""The directory in which the runs of one output keep the journals of their sessions.

    outputs/demo.jsonl        the episodes of the last run
    outputs/.demo.jsonl.lock  held by a run while it is live, wherever its state is, and by whichever link it writes
    outputs/demo.state/lock   held by a run while it is live; it names the output
    outputs/demo.state/1/     the state directory (`polar_gym.gateway.node.state`) of the first run, which holds
                              settings.json too (`polar_gym.runs.settings`)
    outputs/demo.state/2/     that of the next run

A run that begins has a new number, and one that is resumed has the last one. A file of episodes that is set aside names
the journals of its own run, which stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from polar_gym import durable
from polar_gym.config.run_config import RunConfig
from polar_gym.durable import records
from polar_gym.episodes.output import DEVICES
from polar_gym.errors import ConfigError, UnavailableError, kind_of
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.paths import check_writable
from polar_gym.schema import Episode


def state_of(config: RunConfig) -> Path:
    """Return the directory of an output's journals, as an absolute path: episodes name it, and are read anywhere."""
    output = config.rollout.output
    return (config.rollout.state or output.with_name(f"{output.name.removesuffix('.jsonl')}.state")).absolute()


def check_begun(config: RunConfig) -> None:
    """Raise `ConfigError` where no run has written the output: it holds no whole episode, and has no journals."""
    output, root = config.rollout.output, state_of(config)
    with suppress(FileNotFoundError, NotADirectoryError):
        if (root / "lock").read_text(encoding="utf-8") == os.path.relpath(output.absolute(), root):
            return
    try:
        with output.open("rb") as lines:
            begun = next(records(lines, output, Episode, "an episode of this version", may_be_cut=True), None)
    except FileNotFoundError:
        begun = None
    except OSError as error:
        raise kind_of(error)(f"--resume={str(output)!r}: {error.strerror}; name the file of a run") from error
    if begun is None:
        raise ConfigError(f"--resume={str(output)!r}: no run has written this file; begin one without --resume")


@contextmanager
def own_state(config: RunConfig, *, resume: bool = False) -> Iterator[StateDirectory]:
    """Give a run a state directory of its own, not made yet; with `resume`, that of the output's last run.

    No other run writes the output meanwhile. Raises `ConfigError` where one does, where the directory of the output's
    journals belongs to another output, and where output or directory cannot be written.
    """
    output, root = config.rollout.output, state_of(config)
    with _alone(output), _held(root, output.absolute()):
        last = max((int(each.name) for each in root.iterdir() if each.name.isdecimal()), default=0)
        yield StateDirectory(root / str(max(last, 1) if resume else last + 1))


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Hold the file that a path of episodes leads to: another run may name it by a link, or have another state."""
    file = output.resolve()
    device = DEVICES in output.absolute().parents  # runs may share it
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = nullcontext() if device else durable.locked(file.with_name(f".{file.name}.lock"), wait=False)
    except BlockingIOError as error:
        raise UnavailableError(
            f"rollout.output={str(output)!r}: a run that writes {file} is live; wait for its end, or set "
            "rollout.output to another file"
        ) from error
    except OSError as error:
        raise kind_of(error)(
            f"rollout.output={str(output)!r}: {error.strerror}; name a file that can be written"
        ) from error
    with lock:
        check_writable("rollout.output", output)
        yield


@contextmanager
def _held(root: Path, output: Path) -> Iterator[None]:
    """Hold a directory for the run that writes `output`, whose path from there is in the lock: folders may be moved."""
    lock, own = root / "lock", os.path.relpath(output, root)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = durable.locked(lock, wait=False, mode=0o600)
    except BlockingIOError as error:
        owner = os.path.normpath(root / lock.read_text(encoding="utf-8"))
        raise UnavailableError(
            f"rollout.state={root}: a run that writes {owner} is live; wait for its end, or set rollout.output to "
            "another file"
        ) from error
    except OSError as error:
        raise kind_of(error)(f"rollout.state={root}: {error.strerror}; name a directory that can be written") from error
    with file:
        file.seek(0)
        if not (owner := file.read().decode()):
            file.write(own.encode())
            file.flush()
        elif owner != own:
            raise ConfigError(
                f"rollout.state={root}: the sessions there are of {os.path.normpath(root / owner)}; name a directory "
                "of this run alone"
            )
        yield
