"""The keys of the service's HTTP ports: where they come from, and who may be without."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

from polar_gym.errors import ConfigError

NODE_KEY = "POLAR_GYM_NODE_KEY"
"""Between rollout server and nodes."""
SERVICE_KEY = "POLAR_GYM_SERVICE_KEY"
"""For trainers."""
MIN_LENGTH = 16


def take_key(name: str) -> str | None:
    """Like `read_key`; it is taken out of the environment, so that no process that is started from here inherits it."""
    key = read_key(name)
    os.environ.pop(name, None)
    return key


def read_key(name: str) -> str | None:
    """The key in the environment variable `name`, or in the file that `{name}_FILE` names. Raises `ConfigError`."""
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


def check_binding(setting: str, host: str, key: str | None, name: str) -> None:
    """Raises `ConfigError` where a port would be open to other machines without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"{setting}: other machines could reach it, and there is no key; set {name} (or {name}_FILE), "
            f"or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authorized(header: str | None, key: str | None) -> bool:
    """Whether an `Authorization` header holds the key; without a key everybody may."""
    if key is None:
        return True
    scheme, _, given = (header or "").partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(given.encode(errors="replace"), key.encode())
