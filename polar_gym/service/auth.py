"""Who may ask for what: one key for trainers, one for nodes, and nobody else where anybody else could reach us."""

from __future__ import annotations

from dataclasses import dataclass, field

from polar_gym.http.keys import NODE_KEY, SERVICE_KEY, authorized, check_binding, take_key

__all__ = ["CALLBACK_KEY", "NODE_KEY", "SERVICE_KEY", "Keys", "bearer_is", "check_exposure", "load_keys"]

CALLBACK_KEY = "POLAR_GYM_CALLBACK_KEY"


@dataclass(frozen=True, slots=True)
class Keys:
    """None: no key is asked for, which only a server on the loopback interface allows."""

    service: str | None = field(default=None, repr=False)
    node: str | None = field(default=None, repr=False)
    callback: str | None = field(default=None, repr=False)

    @property
    def signing(self) -> str | None:
        """Signs callbacks: the receivers' own key, or the one that they submit tasks with."""
        return self.callback or self.service


def load_keys() -> Keys:
    """Each from its environment variable, or from the file that `<variable>_FILE` names; what is started from here
    inherits none. Raises `ConfigError`."""
    return Keys(take_key(SERVICE_KEY), take_key(NODE_KEY), take_key(CALLBACK_KEY))


def check_exposure(listen: str, host: str, keys: Keys) -> None:
    """Raises `ConfigError` where others could reach a server that asks for no key."""
    check_binding(f"listen={listen}", host, keys.service, SERVICE_KEY)
    check_binding(f"listen={listen}", host, keys.node, NODE_KEY)


def bearer_is(header: str | None, *allowed: str | None) -> bool:
    """Whether an Authorization header holds one of the keys."""
    matches = [authorized(header, key) for key in allowed if key is not None]
    return any(matches)
