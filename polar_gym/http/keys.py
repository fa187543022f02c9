"""Reads the keys of the rollout service's HTTP ports, checks requests and addresses against them, and hides keys.

/proc/PID/environ and /proc/PID/cmdline show the memory that the kernel filled when the program started. `os.environ`
and `sys.argv` are copies of that memory: a change of them changes neither file.
"""

from __future__ import annotations

import ctypes
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar_gym.errors import ConfigError

NODE_KEY = "POLAR_GYM_NODE_KEY"
"""The variable with the key between rollout server and nodes."""
SERVICE_KEY = "POLAR_GYM_SERVICE_KEY"
"""The variable with the key of trainers."""
CALLBACK_KEY = "POLAR_GYM_CALLBACK_KEY"
"""The variable with the key that signs callbacks."""
MIN_LENGTH = 16
"""Characters of a key, at least."""
MIN_HIDDEN = 8
"""A shorter value, such as EMPTY or 1, is no secret, and may also be the value of other variables."""
STAT_BOUNDS = ((45, 46), (47, 48))
"""The fields of /proc/PID/stat, counted behind the program's name, with the bounds of arguments and environment."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a rollout server. None: the server asks for no such key, which is allowed on loopback only."""

    service: str | None = field(default=None, repr=False)
    node: str | None = field(default=None, repr=False)
    callback: str | None = field(default=None, repr=False)

    @property
    def signing(self) -> str | None:
        """The key that signs callbacks: the receivers' own key, or the one that they submit tasks with."""
        return self.callback or self.service


def load_keys() -> Keys:
    """Take all keys of a rollout server out of the environment. Raises `ConfigError`."""
    return Keys(take_key(SERVICE_KEY), take_key(NODE_KEY), take_key(CALLBACK_KEY))


def take_key(name: str) -> str | None:
    """Read a key like `read_key`, and hide the variable with the key from other processes."""
    key = read_key(name)
    _hide(os.environ.get(name, ""))
    return key


def hide_keys(*others: str | None) -> None:
    """Hide all keys of the rollout service, and other keys, from other processes, before this process runs sessions."""
    for key in (*map(os.environ.get, (SERVICE_KEY, NODE_KEY, CALLBACK_KEY)), *others):
        _hide(key or "")


def _hide(secret: str) -> None:
    """Remove the environment variables whose value is `secret`, so that no child inherits the secret. Overwrite that
    value, also in the arguments KEY=`secret` and KEY={api_key: `secret`}, where /proc shows them.

    A value shorter than `MIN_HIDDEN` is left alone.
    """
    if len(secret) < MIN_HIDDEN:
        return
    for name in [name for name, value in os.environ.items() if value == secret]:
        del os.environ[name]
    value = os.fsencode(secret)
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    for first, last in STAT_BOUNDS:
        start, end = int(stat[first]), int(stat[last])
        for found in re.finditer(
            b"(?<=[=: ])" + re.escape(value) + b"(?=[\0,} ])", ctypes.string_at(start, end - start)
        ):
            ctypes.memset(start + found.start(), ord("*"), len(value))


def read_key(name: str) -> str | None:
    """Return the key in the environment variable `name`, or in the file that `{name}_FILE` names; None without both.

    Raises `ConfigError`.
    """
    key, file = os.environ.get(name), os.environ.get(f"{name}_FILE")
    if key is None and file:
        try:
            key = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}_FILE={file}: cannot be read: {error}") from error
    if key is None:
        return None
    key = key.strip()
    if len(key) < MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{name}: a key is at least {MIN_LENGTH} printable ASCII characters without blanks; make one with: "
            "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return key


def check_exposure(listen: str, host: str, keys: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` where other machines could reach a port that lacks a key.

    `keys`: the keys of the port by the names of their environment variables.
    """
    for name, key in keys.items():
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"listen={listen}: other machines could reach it, and there is no key; set {name} (or {name}_FILE), "
                f"or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Return whether an address or name belongs to the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer_is(header: str | None, keys: Iterable[str]) -> bool:
    """Return whether an `Authorization` header holds one of the keys. The time taken tells nothing about the keys."""
    scheme, _, given = (header or "").partition(" ")
    matches = [hmac.compare_digest(given.encode(errors="replace"), key.encode()) for key in keys]
    return scheme == "Bearer" and any(matches)
