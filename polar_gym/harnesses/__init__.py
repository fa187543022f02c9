"""One module for each harness: how to install, configure and launch it. No other room knows the name of a harness.

A harness is a plug-in: a module that defines one `HARNESS`, an object of the class `Harness` below. Only `launch` is
required. A harness that is a package of npm or PyPI is installed unmodified, at a pinned version, into a cache on the
gateway's machine (`install`), and mounted read-only into the sandbox, one of PyPI with a Python of its own
(`interpreter`). A harness that writes the date into its prompt is told `spec.today`, if it can be told a date
(`today`). `sdk` holds the variables that programs with an SDK read, and `mcp` the server of an environment's tools.

This room uses runtimes, registry, schema and durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from polar_gym.registry import Options, Registry
from polar_gym.schema import HarnessSpec

LEAN_PROMPT = """\
You are a coding agent. You work in the user's directory through the tools that you are given: run commands to look \
around, to edit files and to check your work. Work until the task is done without asking questions, change only what \
the task needs, then say briefly what you did.
"""
"""Replaces the system prompt of a harness in its lean profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """The facts from which a harness module describes a launch."""

    spec: HarnessSpec
    base_url: str
    """The proxy's address, without a trailing slash and without `/v1`."""
    api_key: str
    """The session's key."""
    context_length: int
    """The engine's context length in tokens."""
    instruction: str
    home: str
    """The agent's home directory inside the sandbox."""
    workdir: str
    mcp_url: str | None = None
    """The MCP server with the tools of the session's environment, which takes `api_key` as a bearer token; or none."""
    executable: Sequence[str]
    """The first arguments of argv, which start the harness inside the sandbox; empty for one without a package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a harness on one task."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path inside the sandbox -> text, written before the start."""
    stdin: bytes = b""


def no_hints(headers: Mapping[str, str], body: Mapping[str, object]) -> dict[str, str]:
    """Return no hints: for harnesses whose requests do not tell their purpose."""
    return {}


def objects(value: object) -> list[dict[str, Any]]:
    """Return the objects in a part of a request, which may have any form."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def system_prompt(body: Mapping[str, object]) -> str:
    """Return the text of the system message that a chat request begins with, else "". The body may have any form."""
    first = next(iter(objects(body.get("messages"))), {})
    content = first.get("content") if first.get("role") == "system" else None
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """The description of a harness."""

    npm_package: str | None = None
    pypi_package: str | None = None
    """Without a package nothing is installed or mounted: `launch` starts a program that the sandbox has."""
    pypi_pins: Sequence[str] = ()
    """Versions of packages that the PyPI package leaves open, where newer ones break it: `NAME==VERSION`."""
    version: str = ""
    script: str = ""
    """The program's entry file inside the npm package, run by node, or the name of a script that the PyPI package
    installs. Empty: the program is native."""
    native_programs: Mapping[str, str] = field(default_factory=dict)
    """Machine, as `platform.machine()` names it -> the native program for that machine, below `node_modules`: npm
    installs its package together with `npm_package`."""
    launch: Callable[[LaunchContext], Launch]
    classify: Callable[[Mapping[str, str], Mapping[str, object]], dict[str, str]] = no_hints
    """(request headers, request body) -> `ModelCall.hints`."""
    told_today_by: Literal["node", "bun"] | None = None
    """The program that runs the harness, and first loads the script that sets the date (`today`).

    None: the harness cannot be told a date.
    """
    keep_alive: bytes | None = None
    """Bytes that keep this harness waiting. None: the provider's own keep-alive does."""
    broken_stream: Literal["error", "end"] = "error"
    """How to end a stream that the engine broke off, so that this harness asks again.

    `error`: with the provider's error event. `end`: silently, before the terminal event.
    """
    ends_by: str = ""
    """The shell command by which an agent ends its run, where an answer without a tool call does not."""
    acts_on_text: bool = False
    """Whether the harness may act on the text of an answer. False: it acts on structured tool calls only."""
    project_settings: Sequence[str] = ()
    """Files and directories of a workspace by which a task's repository changes the settings that `launch` makes, or
    adds agents, skills, commands or tools."""
    lean_project_settings: Sequence[str] | None = None
    """Those that the lean profile obeys. None: all."""
    mcp_prefix: str | None = None
    """The text that this harness puts before the name of a tool of the MCP server `mcp.SERVER`.

    None: `launch` ignores `mcp_url`, and no environment with tools can be given to the harness.
    """
    volatile: Mapping[str, str] = field(default_factory=dict)
    """Fields of system text, user text and tool descriptions that change from run to run: name -> a regular expression
    that begins with the field's label, and spans at most `VOLATILE_LENGTH` characters of one line."""
    handles: Mapping[str, str] = field(default_factory=dict)
    """Names that the harness makes up for its own things, such as sub-agents, and that the policy gives back: name -> a
    regular expression that begins with the label in a tool's result, and whose only group is the handle."""
    notice: str = ""
    """A regular expression of a whole user message that tells of something that happened meanwhile, such as the end of
    a sub-agent: it comes with whichever request is next. Empty: the harness sends none."""
    Options: type[Options] = Options

    @property
    def package(self) -> str | None:
        """The package's name on npm or PyPI."""
        return self.npm_package or self.pypi_package

    @property
    def pinned(self) -> str:
        """The version, with `pypi_pins`; empty for a harness without a package."""
        return ", ".join([self.version, *self.pypi_pins])


HARNESSES: Registry[Harness] = Registry("harness", __name__, Harness)
