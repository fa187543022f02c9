"""The record of one part of an attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Language = Literal["python", "javascript", "any"]


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One part of an attack.

    Texts may hold `@PACKAGE@`, `@MODULE@` (a dotted name), `@TEST_FILE@`, `@TEST_MODULE@` and `@TEST_DIRECTORY@`.
    """

    name: str
    code: str = ""
    """Program text that a plan puts into some file of the repository; empty: the other parts are the attack."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Path -> content. A file that the repository has gets the content in front of its own."""
    shell: str = ""
    """A command for `sh` that the agent runs in the workspace, after all files are written."""
    language: Language = "python"


def python(name: str, code: str) -> Fragment:
    """Return a fragment of Python that may stand anywhere."""
    return Fragment(name=name, code=code.strip("\n") + "\n")


def shell(name: str, command: str) -> Fragment:
    """Return a fragment that is a command of the agent."""
    return Fragment(name=name, shell=command.strip("\n") + "\n", language="any")


def files(name: str, content: Mapping[str, str | bytes], command: str = "") -> Fragment:
    """Return a fragment that is made of files at fixed paths."""
    texts = {path: text.lstrip("\n") if isinstance(text, str) else text for path, text in content.items()}
    return Fragment(name=name, files=texts, shell=command.strip("\n") + "\n" if command else "")
