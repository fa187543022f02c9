"""Names the files that steer a test runner: its configuration, its build, and modules that the runner imports itself.

Some of these files belong to the task wherever they are: configuration that no source file needs, and packages that no
solution can install (`package.json`, `node_modules`: a grading sandbox has no network). Others are part of solutions in
many projects, since each new source file must be named in them: `Makefile`, `CMakeLists.txt`, `setup.py`, `Cargo.toml`.
They belong to the task only where its command names the program that reads them. There, one line of such a file can
replace the tests. A task whose own solution needs a change to such a file fails its check with the gold patch.

`go.mod` belongs to the solution, except for a change that replaces a module by another: the module of the assertions
could be replaced. A program that another program starts is not seen here, such as `cargo` under `make`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from polar_gym.evaluators.patch import FileChange

_CONFIGURATION = re.compile(
    r"\.?(pytest|tox)\.(ini|toml) | setup\.cfg | pyproject\.toml | \.coveragerc | unittest\.cfg | nose\.cfg | \.noserc"
    r"| (tox|nox)file\.py | .*\.(pth|pyc|pyo) | .*\.(egg-link|egg-info|dist-info|egg) | egg-info"
    r"| package\.json | package-lock\.json | npm-shrinkwrap\.json | yarn\.lock | pnpm-(lock|workspace)\.yaml"
    r"| \.(npmrc|yarnrc|pnpmfile|mocharc|taprc|nycrc|babelrc|swcrc)(\..*)? | mocha\.opts | bunfig\.toml"
    r"| (jest|vitest|vite|ava|karma|babel|playwright|cypress)\.(config|conf|setup|workspace)\..* | tsconfig\b.*\.json"
    r"| node_modules | __mocks__ | __snapshots__ | \.rspec | phpunit\.xml.*",
    re.IGNORECASE | re.VERBOSE,
)
"""Matches a part of a path. Python's metadata is found in any case of letters."""
_MODULES = frozenset({"conftest", "sitecustomize", "usercustomize"})
_BUILDS = {
    r"g?make": r"(gnu)?makefile(\..*)?|.*\.ma?k",
    r"cmake|ctest": r"cmakelists\.txt|.*\.cmake|cmake(user)?presets\.json",
    r"meson|ninja": r"meson\.build|meson(_options\.txt|\.options)|build\.ninja",
    r"setup\.py|pip\d*|tox|nox": r"\./setup\.py",
    r"inv|invoke": r"\./tasks\.py|invoke\.(ya?ml|json|py)",
    r"cargo": r"cargo\.(toml|lock)|\.cargo|build\.rs|rust-toolchain.*",
    r"gradlew?": r".*\.gradle(\.kts)?|gradle\.properties|buildsrc|gradle",
    r"mvnw?": r"pom\.xml|\.mvn",
    r"go": r"vendor",
    r"rake|rspec|bundle": r"rakefile|.*\.rake|gemfile(\.lock)?",
    r"composer|phpunit": r"composer\.(json|lock)|vendor",
}
"""Program -> the parts of paths that decide what the program runs; after `./`, only the file at the root."""
_REPLACES_A_MODULE = re.compile(rb"^\+.*=>", re.MULTILINE)


def steers(change: FileChange, path: PurePosixPath, programs: Collection[str]) -> bool:
    """Return whether a file steers the runner of the tests. `programs` are the names that the tests' command has."""
    return (
        path.name.partition(".")[0] in _MODULES
        or any(part in _MODULES or _CONFIGURATION.fullmatch(part) for part in path.parts)
        or any(re.fullmatch(_built_by(programs), part, re.IGNORECASE) for part in (*path.parts, f"./{path}"))
        or (path.name in ("go.mod", "go.work") and _REPLACES_A_MODULE.search(change.section) is not None)
    )


def _built_by(programs: Collection[str]) -> str:
    return "|".join(files for names, files in _BUILDS.items() if any(re.fullmatch(names, each) for each in programs))
