"""A harness as a Python function, run inside the sandbox:

    function(instruction: str, base_url: str, api_key: str, model: str)

`target` names it as `package.module:function`, which must be importable on the gateway's machine, or as
`path/to/file.py:function` there. The file, or the whole top-level package, is copied into the sandbox. All its other
imports must be in the sandbox: the standard library, and the task's requirements. The sandbox's `python3` runs the
function: that of the task's virtual environment if there is one.

`base_url` is without `/v1`; the variables that the official SDKs read are set as well (`harnesses/sdk.py`).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated

from pydantic import field_validator

from polar_gym.harnesses import Harness, Launch, LaunchContext
from polar_gym.harnesses.install import InstallError
from polar_gym.harnesses.sdk import sdk_environment
from polar_gym.registry import Names, Options

MAX_BYTES = 16 * 1024 * 1024
"""The limit for the bytes of a package, which is copied for every session."""

_RUNNER = """\
import importlib, sys
root, module, function, *model = sys.argv[1:]
sys.path[0] = root
getattr(importlib.import_module(module), function)(sys.stdin.read(), *model)
"""


class PythonOptions(Options):
    target: Annotated[str, Names.CODE]
    """`package.module:function` or `path/to/file.py:function`; called with (instruction, base_url, api_key, model)."""

    @field_validator("target")
    @classmethod
    def _names_a_function(cls, target: str) -> str:
        if not re.fullmatch(r"([^:]+\.py|\w+(\.\w+)*):[^\W\d]\w*", target):
            raise ValueError("expected package.module:function or path/to/file.py:function")
        return target


def launch(context: LaunchContext) -> Launch:
    """Return the launch. Raises `InstallError` where the gateway's machine has no such file or package."""
    where, _, function = PythonOptions.model_validate(context.spec.options).target.partition(":")
    root = f"{context.home}/.polar-gym/agent"
    if where.endswith(".py"):
        base, paths, module = _file(Path(where))
    else:
        base, paths, module = _package(where)
    return Launch(
        argv=[
            *("python3", "-c", _RUNNER, root, module, function),
            *(context.base_url, context.api_key, context.spec.model_name),
        ],
        environment=sdk_environment(context),
        files={f"{root}/{path.relative_to(base)}": text for path, text in _read(paths).items()},
        stdin=context.instruction.encode(),
    )


def _file(path: Path) -> tuple[Path, list[Path], str]:
    """Return the directory of the paths, the paths, and the module to import. Raises `InstallError`."""
    if not path.is_file():
        raise InstallError(f"harness.target: there is no file {path.absolute()} on the gateway's machine")
    return path.parent, [path], path.stem


def _package(module: str) -> tuple[Path, list[Path], str]:
    """Return the same as `_file` for the top-level package of a module. Raises `InstallError`."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.submodule_search_locations:
        directory = Path(next(iter(spec.submodule_search_locations)))
        found = [path for path in sorted(directory.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
        return directory.parent, found, module
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        return Path(spec.origin).parent, [Path(spec.origin)], module
    raise InstallError(
        f"harness.target: no package {top!r} of Python files can be imported on the gateway's machine; install it, "
        "add its directory to PYTHONPATH, or name a file: path/to/file.py:function"
    )


def _read(paths: list[Path]) -> dict[Path, str]:
    if (size := sum(path.stat().st_size for path in paths)) > MAX_BYTES:
        raise InstallError(
            f"harness.target: its package holds {size} bytes, more than the {MAX_BYTES} that are copied for a session; "
            "move the agent to a package of its own"
        )
    try:
        return {path: path.read_text() for path in paths}
    except UnicodeDecodeError as error:
        raise InstallError(f"harness.target: its package holds files that are not UTF-8 text ({error})") from error


HARNESS = Harness(launch=launch, acts_on_text=True, mcp_prefix="", Options=PythonOptions)
