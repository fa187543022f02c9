"""Reading the fields of an untrusted JSON body. Each function returns a value of the type asked for, or raises
`BadRequestError` that names the full path of the field, the value found and the value expected."""

from __future__ import annotations

from typing import Any, TypeVar

from polar_gym.providers import BadRequestError

T = TypeVar("T")

_NAMES: dict[type, str] = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "an object"}


def shown(value: Any) -> str:
    """Return the beginning of a value as text for an error message."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may nest deeper than Python prints
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def expect(value: Any, kind: type[T], field: str) -> T:
    """Return `value`, which must be of exactly this JSON type (a boolean does not count as an integer)."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequestError(field, f"expected {_NAMES[kind]}, got {shown(value)}", code="invalid_type")
    return value


def required(container: dict[str, Any], key: str, kind: type[T], path: str = "") -> T:
    """Return `container[key]`, which must be there."""
    value = container.get(key)
    if type(value) is kind:  # requests are long, and paths are needed for errors only
        return value
    if value is None:
        raise BadRequestError(_at(path, key), f"is missing; send {_NAMES[kind]}", code="missing_required_parameter")
    return expect(value, kind, _at(path, key))


def optional(container: dict[str, Any], key: str, kind: type[T], path: str = "") -> T | None:
    """Return `container[key]`, or None where it is absent or null."""
    value = container.get(key)
    return value if value is None or type(value) is kind else expect(value, kind, _at(path, key))


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def positive(container: dict[str, Any], key: str) -> int | None:
    """Return an optional integer above zero."""
    value = optional(container, key, int)
    if value is not None and value < 1:
        raise BadRequestError(key, f"expected an integer above 0, got {value}")
    return value


def objects(container: dict[str, Any], key: str, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return an optional list of objects, each with its path."""
    field = _at(path, key)
    items = enumerate(optional(container, key, list, path) or [])
    return [(at, expect(entry, dict, at)) for at, entry in ((f"{field}[{i}]", entry) for i, entry in items)]


def refuse(container: dict[str, Any], key: str, allowed: tuple[Any, ...], why: str) -> None:
    """Raise unless the field is absent, null or one of `allowed`."""
    value = container.get(key)
    if value is not None and value not in allowed:
        raise BadRequestError(key, f"{shown(value)} is not supported: {why}", code="unsupported_value")
