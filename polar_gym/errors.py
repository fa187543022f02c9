"""The error of a bad config, and its message: the key, its value, and what is allowed or must be installed."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

SHOWN = 200
"""Characters of a wrong value that an error shows."""

_TYPE = re.compile(r"(str|int|float|bool|(list|dict)\[.*\])")
"""The type that pydantic appends to the key in a problem's location, where the value may be of several types."""


class ConfigError(ValueError):
    """A config that cannot be run. The message names the key, the value and what is allowed."""


class UnavailableError(ConfigError):
    """A port, a directory or a disk cannot be used now. The same command may succeed later."""


_PASSING = (errno.EADDRINUSE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
"""The errors of a port or a directory in use, and of a full disk."""


def kind_of(error: BaseException | None) -> type[ConfigError]:
    """Return the error that a setting gets because of an error of the operating system."""
    return UnavailableError if isinstance(error, OSError) and error.errno in _PASSING else ConfigError


def how_to_install(*extras: str) -> str:
    """Return the command that installs the packages of some extras. No index has this package itself."""
    try:
        lines = metadata.requires("polar-gym") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        return f"pip install '.[{','.join(extras)}]', in the checkout"
    named = [f"extra == '{extra}'" for extra in extras]
    wanted = {line.partition(";")[0].strip() for line in lines if line.replace('"', "'").endswith(tuple(named))}
    return f"pip install {shlex.join(sorted(wanted))}"


def validated(model: type[M], values: Any, prefix: str = "") -> M:
    """Return `values` as a checked `model`. Raises `ConfigError` with the lines of `explain`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, prefix)) from error


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "", also: Iterable[str] = ()) -> str:
    """Return a line for each problem: the key, the value, what is allowed. `also`: keys beside the model's own."""
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"] if not _TYPE.fullmatch(str(part))]
        key = ".".join([prefix, *place] if prefix else place) or "the whole"
        if problem["type"] == "extra_forbidden":
            known = _known_keys(model, problem["loc"][:-1])
            known = sorted({*known, *also}) if len(problem["loc"]) == 1 else known
            lines.append(f"{key}={shortened(problem['input'])}: unknown key; known here: {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: is required")
        else:
            lines.append(f"{key}={shortened(problem['input'])}: {said(problem)}")
    return "\n".join(lines)


def in_one_line(error: ValidationError, prefix: str = "", whole: str = "") -> str:
    """Return the place and the text of each problem. `whole`: the name of the place that is the whole input."""
    places = ((prefix + (".".join(map(str, problem["loc"])) or whole), problem) for problem in error.errors())
    return "; ".join(f"{place}: {said(problem)}" for place, problem in places)


def said(problem: ErrorDetails) -> str:
    """Return the text of one of pydantic's problems, without the kind that pydantic puts before our own texts."""
    return problem["msg"].removeprefix("Value error, ")


def shortened(value: Any) -> str:
    """Return a value for an error, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _known_keys(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)
