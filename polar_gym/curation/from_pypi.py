"""Makes tasks out of two releases of a pure-Python package. The environment has no newer release of the package."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.declared import requirements
from polar_gym.curation.issue import write_issue
from polar_gym.curation.making import Say, Trees, instance_ids, make_known, make_task
from polar_gym.curation.pins import python_version, resolve
from polar_gym.curation.pypi import fetch_sdist, metadata, unpack
from polar_gym.curation.releases import Comparison
from polar_gym.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The two releases that a task is made from."""

    package: str
    old: str
    new: str
    extra_requirements: Sequence[str] = ()
    """Requirements of the tests that the package's metadata does not name."""

    @property
    def instance_id(self) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", self.package.lower())
        return f"{name}__{name}-{self.old}-{self.new}"


async def from_releases(release: Release, bench: Bench, out: Path, say: Say) -> Task:
    """Make a task of two releases, and add it to the JSONL file `out`. Raises `CurationError`."""
    if release.instance_id in instance_ids(out):
        raise CurationError(f"{out}: has {release.instance_id} already; remove its line to make it anew")
    with tempfile.TemporaryDirectory(prefix="polar-gym-pypi-") as scratch:
        say("fetching both releases")
        old, new = await asyncio.to_thread(_trees, release, bench.cache, Path(scratch))

        async def instruct(comparison: Comparison, failing: Mapping[str, str]) -> tuple[str, str]:
            return write_issue(release.package, old, new, failing=failing, test_patch=comparison.test_patch)

        trees = Trees(
            instance_id=release.instance_id,
            repo=f"{release.package}/{release.package}",
            old=old,
            new=new,
            needs=lambda: {"python_requirements": pinned(release, requirements(new, python_version()), bench.cache)},
            instruct=instruct,
        )
        return await make_task(trees, bench, out, say, refuse_leaks=False)


def pinned(release: Release, wanted: Sequence[str], cache: Path) -> list[str]:
    """Return what the tests need, pinned. Where that is the package itself, it is the old release: the new one holds
    the solution. Raises `CurationError`."""
    return resolve([*wanted, *release.extra_requirements], cache, constraints=[f"{release.package}=={release.old}"])


def _trees(release: Release, cache: Path, scratch: Path) -> tuple[Path, Path]:
    archives = [fetch_sdist(release.package, version, cache) for version in (release.old, release.new)]
    old, new = unpack(archives[0], scratch / "old"), unpack(archives[1], scratch / "new")
    make_known(old, metadata(old).get("name", old.name), (old / "PKG-INFO").read_text(errors="replace"))
    return old, new
