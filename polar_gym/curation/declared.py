"""Reads what a source tree declares: its name, and what its tests need. Files are read as text, and none is run.

Read are `PKG-INFO` of a source release, `pyproject.toml` (PEP 621, PEP 735, Poetry), `setup.cfg`, the literals in
`setup.py`, `tox.ini`, and files such as `requirements-test.txt`. Of requirements for development in general, only those
count that tests import, and pytest's plug-ins but those that check sources: the rest are linters and builders of
documentation.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from configparser import ConfigParser, Error
from pathlib import Path
from typing import Any

from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from polar_gym.curation import CurationError
from polar_gym.curation.releases import is_test

TEST_GROUPS = ("test", "tests", "testing")
"""Extras, groups and files that list the requirements of tests."""
_GENERAL = ("dev", "develop", "development", "all")
_NAMES = ("black", "checkdocs", "enabler", "flake8", "isort", "mypy", "pretty", "pylint", "ruff", "sugar")
_LINTERS = {f"pytest-{name}" for name in _NAMES}
"""Plug-ins that check sources, or switch on those that do, and those that write another report than pytest's. Some
break pytest although no test uses them."""
_REQUIREMENTS = re.compile(r"(.*[-_/])?(tests?|testing|dev|develop|development)([-_].*)?\.(txt|in)|requirements\.txt")


def package_name(tree: Path) -> str | None:
    """Return the name under which the tree is published; None: the tree does not say."""
    project = _toml(tree)
    names = [
        _released(tree).get("name"),
        project.get("project", {}).get("name"),
        project.get("tool", {}).get("poetry", {}).get("name"),
        _cfg(tree / "setup.cfg").get("metadata", "name", fallback=None),
        _setup(tree).get("name"),
    ]
    return next((name for name in names if isinstance(name, str)), None)


def version_file(tree: Path) -> str | None:
    """Return the path of the module that a build writes with the version, by setuptools-scm or hatch-vcs."""
    tool = _toml(tree).get("tool", {})
    scm = _table(tool.get("setuptools_scm"))
    hooks = _table(_table(_table(_table(tool.get("hatch")).get("build")).get("hooks")).get("vcs"))
    named = (scm.get("version_file"), scm.get("write_to"), hooks.get("version-file"))
    return next((path for path in named if isinstance(path, str) and path.endswith(".py") and ".." not in path), None)


def requirements(tree: Path, python_version: str) -> list[str]:
    """Return the requirements of the package and its tests with this Python. Raises `CurationError`."""
    own = canonicalize_name(package_name(tree) or "")
    imported = _imported_by_tests(tree)
    found: dict[str, str] = {}
    for group, text in _declared(tree):
        try:
            requirement = Requirement(text.partition(" #")[0].strip())
        except InvalidRequirement:
            continue  # an option of pip, or a malformed line; the tests will show whether it was needed
        name = canonicalize_name(requirement.name)
        modules = {name.replace("-", "_"), name.removeprefix("python-").removeprefix("py")}  # PyYAML: `import yaml`
        plugin = name.startswith("pytest-") and name not in _LINTERS
        tool = name in _LINTERS or (group in _GENERAL and not modules & imported and not plugin)
        if tool or name == own or requirement.url is not None or not _holds(requirement, python_version):
            continue
        requirement.marker = None
        found.setdefault(name, str(requirement))
    return list(found.values())


def _holds(requirement: Requirement, python_version: str) -> bool:
    python = {"python_version": ".".join(python_version.split(".")[:2]), "python_full_version": python_version}
    return requirement.marker is None or any(
        requirement.marker.evaluate({**python, "extra": extra}) for extra in ("", *TEST_GROUPS, *_GENERAL)
    )


def _declared(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of a group, `""` for run time, and a requirement in it. Poetry's have no versions."""
    project = _toml(tree)
    standard, poetry = project.get("project", {}), project.get("tool", {}).get("poetry", {})
    for text in _released(tree).get("requires_dist", []):
        extra = re.search(r"""extra *== *["']([\w.-]+)["']""", text)
        kind = _kind(extra[1]) if extra else ""
        yield from [(kind, text)] if kind or not extra else []
    yield from (("", each) for each in _texts(standard.get("dependencies")))
    yield from (("", name) for name in _table(poetry.get("dependencies")) if name != "python")
    cfg, setup = _cfg(tree / "setup.cfg"), _setup(tree)
    yield from (("", each) for each in cfg.get("options", "install_requires", fallback="").splitlines())
    yield from (("", each) for each in _texts(setup.get("install_requires")))
    yield from (("test", each) for each in _texts(setup.get("tests_require")))
    extras = [
        _table(standard.get("optional-dependencies")),
        _table(project.get("dependency-groups")),
        _table(setup.get("extras_require")),
        {name: cfg.get("options.extras_require", name).splitlines() for name in _options(cfg)},
        {name: list(_table(_table(group).get("dependencies"))) for name, group in _table(poetry.get("group")).items()},
        {"dev": list(_table(poetry.get("dev-dependencies")))},
        {"test": _cfg(tree / "tox.ini").get("testenv", "deps", fallback="", raw=True).splitlines()},
    ]
    for groups in extras:
        for name, entries in groups.items():
            kind = _kind(name)
            yield from ((kind, each) for each in _texts(entries) if kind)
    for path in sorted([*tree.glob("*.*"), *tree.glob("requirements/*.*"), *tree.glob("tests/*.*")]):
        relative = path.relative_to(tree).as_posix()
        if (match := _REQUIREMENTS.fullmatch(relative)) and path.is_file() and not path.is_symlink():
            kind = (_kind(match[2]) or "dev") if match[2] else "dev"
            yield from ((kind, line) for line in path.read_text(errors="replace").splitlines())


def _released(tree: Path) -> RawMetadata:
    """Return the core metadata of a source release."""
    path = tree / "PKG-INFO"
    return parse_email(path.read_text(errors="replace") if path.is_file() else "")[0]


def _kind(name: str) -> str:
    """Return "test" or "dev" where an extra is for tests or for development, else ""."""
    words = set(re.split(r"[-_.]", name.lower()))
    return "test" if words & set(TEST_GROUPS) else "dev" if words & set(_GENERAL) else ""


def _imported_by_tests(tree: Path) -> set[str]:
    names: set[str] = set()
    for path in tree.rglob("*.py"):
        if is_test(path.relative_to(tree).as_posix()):
            names.update(re.findall(r"^\s*(?:from|import) +(\w+)", path.read_text(errors="replace"), re.MULTILINE))
    return {name.lower() for name in names}


def _toml(tree: Path) -> dict[str, Any]:
    path = tree / "pyproject.toml"
    try:
        return tomllib.loads(path.read_text(errors="replace")) if path.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise CurationError(f"{path.name}: {error}") from error


def _cfg(path: Path) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(path.read_text(errors="replace") if path.is_file() else "")
    except Error as error:
        raise CurationError(f"{path.name}: {error}") from error
    return parser


def _options(cfg: ConfigParser) -> list[str]:
    return cfg.options("options.extras_require") if cfg.has_section("options.extras_require") else []


def _setup(tree: Path) -> dict[str, Any]:
    """Return the arguments of `setup(...)` in setup.py that are literals, or names of literals."""
    path = tree / "setup.py"
    try:
        module = ast.parse(path.read_text(errors="replace") if path.is_file() else "")
    except SyntaxError:
        return {}
    known = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    arguments: dict[str, Any] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setup"):
            for keyword in node.keywords:
                value = known.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
                try:
                    arguments[keyword.arg or ""] = ast.literal_eval(value) if value is not None else None
                except ValueError:
                    continue  # computed at run time: only running it would tell
    return arguments


def _texts(value: object) -> Iterable[str]:
    several = value if isinstance(value, list | tuple) else [value]
    return [each for each in several if isinstance(each, str)]


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
