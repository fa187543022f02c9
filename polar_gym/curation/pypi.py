"""Fetches releases from the package index, as source trees. No code of a release ever runs here: archives are unpacked,
and metadata is read as text."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import requests
from packaging.metadata import RawMetadata, parse_email
from packaging.utils import canonicalize_name
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DigestMismatchError, NoSuchProjectError, PyPISimple

from polar_gym.curation import CurationError
from polar_gym.runtimes import tar


def fetch_sdist(package: str, version: str, cache: Path) -> Path:
    """Return the archive of a release, downloaded once, with its digest checked. Raises `CurationError`."""
    name = canonicalize_name(package)
    directory = cache / "sdists" / name
    for found in directory.glob(f"{version}/*.tar.gz"):
        return found
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with PyPISimple(os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT) as index:
            packages = index.get_project_page(name).packages
            releases = [each for each in packages if each.package_type == "sdist" and each.version == version]
            archives = [each for each in releases if each.filename.endswith(".tar.gz")]
            if not archives:
                known = sorted({str(each.version) for each in packages if each.package_type == "sdist"})[-12:]
                raise CurationError(f"{package} {version}: no .tar.gz source release; some that exist: {known}")
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                partial = Path(scratch, archives[0].filename)
                index.download_package(archives[0], partial, verify=True)
                final = directory / version / partial.name
                final.parent.mkdir(exist_ok=True)
                return partial.rename(final)
    except NoSuchProjectError as error:
        raise CurationError(f"{package}: the package index has no such package") from error
    except DigestMismatchError as error:
        raise CurationError(f"{package} {version}: was damaged on its way: {error}") from error
    except requests.RequestException as error:
        raise CurationError(f"{package} {version}: the package index cannot be reached: {error}") from error


def unpack(archive: Path, destination: Path) -> Path:
    """Unpack an sdist; its one top-level directory becomes `destination`. Raises `CurationError`."""
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        try:
            with tarfile.open(archive) as files:
                tar.unpack(files, scratch, "data")
        except (tarfile.TarError, OSError) as error:
            raise CurationError(f"{archive}: cannot be unpacked: {error}") from error
        top = list(Path(scratch).iterdir())
        if len(top) != 1 or not top[0].is_dir():
            raise CurationError(f"{archive}: expected one directory at the top, found {[path.name for path in top]}")
        shutil.move(top[0], destination)
    return destination


def metadata(tree: Path) -> RawMetadata:
    """Return the core metadata of an unpacked sdist. Raises `CurationError`."""
    path = tree / "PKG-INFO"
    if not path.is_file():
        raise CurationError(f"{tree.name}: the sdist has no PKG-INFO")
    return parse_email(path.read_text(errors="replace"))[0]
