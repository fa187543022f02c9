"""The settings of `polar-gym gateway` beside the config of engine, proxy and pools."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError, kind_of, validated
from polar_gym.http.keys import is_loopback
from polar_gym.http.urls import is_http_url
from polar_gym.paths import NamedPath
from polar_gym.record import Record


def several(value: Any) -> Any:
    """Return the parts of `a,b` or `[a,b]`, as an operator types them; another value stays as it is."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.removeprefix("[").removesuffix("]").split(",") if part.strip()]


class ListenSettings(Record):
    """The settings that both processes of the rollout service have: the address, the URL for other machines, and the
    parts of the machine that requests may name (`polar_gym.gateway.node.admission`). Their defaults differ."""

    listen: str
    url: str | None = None
    imports: Annotated[list[str], BeforeValidator(several)] = Field(default=[])
    """Import paths that requests may name, package.module:attribute or path/to/file.py:function, besides those in the
    node's own config: IMPORT,IMPORT."""
    directories: Annotated[list[Path], BeforeValidator(several)] = Field(default=[])
    """Directories below which requests may name workspaces and image files, besides the bundled tasks and those in the
    node's own config: DIR,DIR."""

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError(f"expected host:port, e.g. {cls.model_fields['listen'].default}")
        return value

    @field_validator("imports")
    @classmethod
    def _import_paths(cls, value: list[str]) -> list[str]:
        if wrong := [each for each in value if not re.fullmatch(r"[^:]+:\w+", each)]:
            raise ValueError(f"{wrong[0]!r}: expected package.module:attribute or path/to/file.py:function")
        return value

    @field_validator("server", "url", check_fields=False)
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not is_http_url(value):
            raise ValueError("expected a URL, e.g. http://127.0.0.1:8700")
        return value.rstrip("/") if value else value

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def bound(self) -> socket.socket:
        """Return a socket at the address of the settings. Raises `ConfigError`, or `UnavailableError` where another
        process has the port."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise kind_of(error)(f"listen={self.listen}: {error.strerror}") from error

    def own_url(self, port: int) -> str:
        """Return the URL at which others reach this process, which listens on `port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.url or f"http://{host}:{port}"

    @property
    def allowing(self) -> dict[str, Any]:
        """The settings about requests, for a node that this process starts."""
        return {"imports": self.imports, "directories": self.directories}


class GatewaySettings(ListenSettings):
    """The settings of a node of the rollout service."""

    listen: str = "127.0.0.1:8701"
    """Host and port of the control API; port 0: any free port."""
    server: str | None = None
    """The URL of the rollout server that gives out sessions and takes episodes; null: the node has no server, and any
    client with the key may ask the node."""
    url: str | None = None
    """The URL at which the server reaches this node; null: at `listen`."""
    name: str | None = None
    """The name of this node; null: made of the names of machine and port."""
    state: NamedPath = Path("state")
    """The directory that holds sessions while they run, and until their episodes are delivered. One process at a time
    may use it."""
    records: Annotated[list[Path], BeforeValidator(several)] = Field(default=[])
    """State directories of other nodes on storage that this machine sees: DIR,DIR. A session whose node died goes on
    here with its record from there."""
    engine_wait_seconds: float = Field(default=600.0, ge=0)
    """With `server`: how long the node waits at its start for an engine that does not answer yet."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """How long running sessions may go on after SIGTERM; the sessions left then end as interrupted."""
    keep_seconds: float = Field(default=24 * 3600.0, ge=0)
    """How long the node keeps a finished session after its delivery."""
    keep_bytes: int = Field(default=20 * 1024**3, ge=0)
    """How much disk finished sessions may use before the oldest are deleted."""

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
            raise ValueError("expected 1 to 64 letters, digits, '_', '.' or '-'")
        return value

    def named(self) -> str:
        """Return the name of the node: the set one, or one made of machine and port."""
        own = self.port or uuid.uuid4().hex[:8]
        return self.name or f"{re.sub('[^A-Za-z0-9_.-]', '-', socket.gethostname())[:40]}-{own}"


def split_own(arguments: Sequence[str], model: type[ListenSettings]) -> tuple[dict[str, str], list[str]]:
    """Return the `key=value` settings of the process itself, and those of a rollout's config.

    Raises `ConfigError` for a setting that is neither.
    """
    own: dict[str, str] = {}
    others = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r}: expected key=value")
        if key in model.model_fields:
            own[key] = value
        elif key.lstrip("+").partition(".")[0] in RunConfig.model_fields:
            others.append(argument)
        else:
            known = f"{', '.join(model.model_fields)}; of a rollout's config: {', '.join(RunConfig.model_fields)}"
            raise ConfigError(f"{argument}: unknown setting; known here: {known}")
    return own, others


def gateway_settings(values: Mapping[str, Any]) -> GatewaySettings:
    """Return the checked settings. Raises `ConfigError` that names the key, its value and the allowed values."""
    settings = validated(GatewaySettings, values)
    if settings.server is not None and settings.url is None:
        if settings.host in ("0.0.0.0", "::"):
            raise ConfigError(f"url: is required with listen={settings.listen}: where the server reaches this node")
        if is_loopback(settings.host) and not is_loopback(urlsplit(settings.server).hostname or ""):
            raise ConfigError(
                f"url: is required with server={settings.server}, which cannot reach listen={settings.listen} if it is "
                "on another machine; set listen=0.0.0.0:8701 and url=http://THIS_MACHINE:8701"
            )
    return settings
