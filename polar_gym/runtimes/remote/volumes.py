"""Layers that a provider keeps for its sandboxes: volumes, each filled once and named by the hash of its content.

A sandbox has its own layers alone, read-only. They are filled in a sandbox without an agent, which ends before the
first one that uses them begins. A volume without its mark counts as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_gym.paths import cache_dir
from polar_gym.runtimes.remote.provider import SupportsSharedStorage

VOLUMES = "/opt/polar-gym/.volumes"
"""The directory in a sandbox that has the volumes, each at its name."""

PREFIX = "polar-gym-"
"""Of a volume's name; the rest is the hash."""

MARK = ".complete"
"""The file in a volume that is filled."""

FILL = f"""
set -e
volume="{VOLUMES}/{PREFIX}$2"
mkdir -p "$volume"
part=$(mktemp -d "$volume/.part-XXXXXX")
gzip -dc "$1" | tar -x -o -f - -C "$part"
[ -e "$volume/$3" ] || mv "$part/$3" "$volume/$3"
rm -rf "$1" "$part"
touch "$volume/{MARK}"
"""
"""The script that fills a volume; the arguments are an archive, its hash, and its top entry. Others may do the same."""

EMPTY = f"""
for each; do [ -e "{VOLUMES}/{PREFIX}$each/{MARK}" ] || echo "$each"; done
"""
"""The script that prints those of its arguments, which are hashes, whose volume is not filled."""


@dataclass(frozen=True)
class Volumes:
    """How a provider's sandboxes get volumes."""

    options: Callable[[Sequence[str], bool], Mapping[str, Any]]
    """(hashes, whether they are to be filled) -> lists that a sandbox's `provider_options` need."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What a sandbox's metadata needs."""


def volumes(name: str, provider: object) -> Volumes | None:
    """Return how this provider's sandboxes get volumes; None where it has none."""
    if name == "docker":
        return Volumes(lambda hashes, fill: {"volumes": _bound(hashes, fill, PREFIX)})
    if name == "apptainer":
        return Volumes(lambda hashes, fill: {"binds": _bound(hashes, fill, f"{_directories(hashes)}/")})
    if not isinstance(provider, SupportsSharedStorage):
        return None
    try:
        metadata = provider.shared_volume_metadata()
    except NotImplementedError:  # its operator configured no storage
        return None

    def shared(hashes: Sequence[str], fill: bool) -> Mapping[str, Any]:
        if fill:  # the root of all volumes, in which theirs are made
            return provider.shared_volume_options(None, VOLUMES)
        options: dict[str, Any] = {}
        for each in hashes:
            options = added(options, provider.shared_volume_options(f"{PREFIX}{each}", _at(each), read_only=True))
        return options

    return Volumes(shared, metadata)


def added(options: Mapping[str, Any], more: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return options whose lists have those of `more` too."""
    found = dict(options)
    for key, value in more.items():
        had = found.get(key) or []
        found[key] = [*([had] if isinstance(had, str) else had), *value]
    return found


def _bound(hashes: Sequence[str], fill: bool, sources: str) -> list[str]:
    return [f"{sources}{each}:{_at(each)}{'' if fill else ':ro'}" for each in hashes]


def _at(digest: str) -> str:
    return f"{VOLUMES}/{PREFIX}{digest}"


def _directories(hashes: Sequence[str]) -> Path:
    """Return the directory of this machine's own volumes, in which these are made."""
    parent = cache_dir() / "volumes"
    for each in hashes:
        (parent / each).mkdir(parents=True, exist_ok=True)
    return parent
