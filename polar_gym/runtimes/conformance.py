"""Try the laws of a sandbox in real sandboxes. Authors of runtimes, and of providers of sandboxes, run this:

    python -m polar_gym.runtimes.conformance runtime=bubblewrap runtime=remote runtime.provider=NAME

Each `runtime=NAME` begins the settings of a runtime, and a column of the table. Exits with 1 where a law does not hold.
The sandboxes need sh and python3. `polar-gym doctor --sandbox` tries what an attacker would.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from polar_gym.console import console, errors, table
from polar_gym.errors import ConfigError, in_one_line
from polar_gym.registry import UnknownNameError
from polar_gym.runtimes import RUNTIMES
from polar_gym.runtimes.laws import HOLD, LAW_SECONDS, LAWS, Trial, hold
from polar_gym.schema import RuntimeSpec


async def examine(spec: RuntimeSpec, laws: Collection[str] = tuple(LAWS)) -> dict[str, str]:
    """Return the problem that was found with each of these laws, "" where it holds. Raises `ConfigError` where the
    machine lacks a part of the runtime."""
    runtime = RUNTIMES.make(spec)
    if lacking := await asyncio.to_thread(runtime.check):
        raise ConfigError(f"runtime={spec.name}: {'; '.join(lacking)}")
    found = {}
    for name in laws:
        with tempfile.TemporaryDirectory(prefix="polar-gym-law-") as directory:
            Path(directory).chmod(0o755)
            try:
                async with asyncio.timeout(LAW_SECONDS):
                    await LAWS[name](Trial(runtime, spec, Path(directory)))
            except Exception as error:  # noqa: BLE001 - whatever goes wrong, the law does not hold
                found[name] = " ".join(f"{type(error).__name__} {error}".removeprefix("AssertionError ").split())
            else:
                found[name] = ""
    await runtime.close()
    return found


def specs(arguments: Sequence[str]) -> list[RuntimeSpec]:
    """Return the runtimes that the arguments name. Raises `ConfigError`."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("runtime="):
            groups.append([f"name={argument.removeprefix('runtime=')}"])
        elif argument.startswith("runtime.") and "=" in argument and groups:
            groups[-1].append(argument.removeprefix("runtime."))
        else:
            raise ConfigError(f"{argument!r}: expected runtime=NAME, and then its settings runtime.KEY=VALUE")
    if not groups:
        raise ConfigError("no runtime is named: expected runtime=NAME, and then its settings runtime.KEY=VALUE")
    found = [RuntimeSpec.model_validate(OmegaConf.to_container(OmegaConf.from_dotlist(each))) for each in groups]
    for spec in found:
        try:
            RUNTIMES.options(spec)
        except (UnknownNameError, ValidationError) as error:
            raise ConfigError(f"runtime={spec.name}: {_problem(error)}") from error
    return found


def _problem(error: UnknownNameError | ValidationError) -> str:
    """Return an error in one line, with the names of the settings."""
    if isinstance(error, UnknownNameError):
        return str(error)
    return in_one_line(error, "runtime.")


def render(found: Sequence[tuple[str, dict[str, str]]]) -> Table:
    shown = table("laws of a sandbox", "law", *(name for name, _ in found), justify="left")
    for law in LAWS:
        shown.add_row(law, *(_cell(each.get(law)) for _, each in found))
    return shown


def _cell(problem: str | None) -> Text:
    """Return what a table says of a law; None: it was not tried."""
    if problem is None:
        return Text("-")
    return Text(problem, "bold red") if problem else Text("holds", "green")


def main() -> None:
    if sys.argv[1:2] == [HOLD]:
        _, _, session_id, seconds, spec = sys.argv
        asyncio.run(hold(session_id, seconds, RuntimeSpec.model_validate_json(spec)))
    try:
        asked = specs(sys.argv[1:])
        found = [
            (" ".join((spec.name, spec.options.get("provider", ""))), asyncio.run(examine(spec))) for spec in asked
        ]
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    console.print(render(found))
    sys.exit(any(problem for _, each in found for problem in each.values()))


if __name__ == "__main__":
    main()
