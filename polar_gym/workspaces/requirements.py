"""Checks the packages that a task asks for: names of an index, with extras, versions and markers.

With a URL, a path or an option of pip, a row or a request could make the gateway's machine fetch, open or build things.
"""

from __future__ import annotations

from packaging.requirements import InvalidRequirement, Requirement

_ARCHIVES = (".whl", ".zip", ".tar", ".tgz", ".tbz", ".txz", ".tlz", ".gz", ".bz2", ".xz", ".lz", ".lzma")
"""Ends of names that pip takes for files."""


def check_requirement(text: str) -> str:
    """Return the requirement. Raises `ValueError` where it names anything but a package of an index."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError("expected a package's name and versions, e.g. 'attrs>=23,<26'") from error
    if requirement.url is not None:
        raise ValueError("a URL may not be named; name the package and its versions, e.g. 'attrs>=23,<26'")
    if requirement.name.lower().endswith(_ARCHIVES):
        raise ValueError("a file may not be named; name the package and its versions, e.g. 'attrs>=23,<26'")
    return text
