"""One file per harness: how to install, configure and launch it. Nothing else in the package knows a harness's name.

Each module here defines one `HARNESS`. If it is an npm package, that is installed unmodified at a pinned version into
a cache on the gateway's machine (`install`) and mounted read-only into the sandbox. One that writes the date into its
prompt is told `spec.today`, where it can be told (`today`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from polar_gym.registry import Options, Registry
from polar_gym.schema import HarnessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What a harness file may use to describe a launch."""

    spec: HarnessSpec
    base_url: str
    """The gateway, without a trailing slash and without `/v1`."""
    api_key: str
    """The session's key."""
    context_length: int
    """The engine's context length in tokens."""
    instruction: str
    home: str
    """The agent's home directory inside the sandbox."""
    workdir: str
    executable: Sequence[str]
    """Argv prefix that starts the harness inside the sandbox; empty where it is no npm package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a harness on one task."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path inside the sandbox -> text, written before the start."""
    stdin: bytes = b""


def no_hints(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """For harnesses whose requests say nothing about their purpose."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A harness, described."""

    npm_package: str | None = None
    """None: nothing is installed or mounted; `launch` starts what the sandbox has."""
    version: str = ""
    script: str = ""
    """The program's entry file inside the npm package, run by node."""
    native_packages: Mapping[str, str] = field(default_factory=dict)
    """Machine, as `platform.machine()` names it -> the npm package with the program for it, which comes along with
    `npm_package`; `script` is inside that one then, and is started as it is. Empty: a program for node."""
    launch: Callable[[LaunchContext], Launch]
    classify: Callable[[Mapping[str, str], Mapping[str, object]], dict[str, str]] = no_hints
    """(request headers, request body) -> `ModelCall.hints`."""
    told_today_by: Literal["node", "bun"] | None = None
    """The program that runs it and loads the script with `spec.today` (`today`); None: it cannot be told a date."""
    keep_alive: bytes | None = None
    """What keeps this client waiting, where the provider's own keep-alive does not."""
    broken_stream: Literal["error", "end"] = "error"
    """How a stream ends that the engine broke off, so that this client asks again: with the provider's error event, or
    without a word before its terminal event."""
    Options: type[Options] = Options


HARNESSES: Registry[Harness] = Registry("harness", __name__)
