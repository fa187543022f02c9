"""Shared fixtures and settings."""

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.docker_daemon import docker_host

__all__ = ["docker_host"]

# A law does not depend on how busy the machine is. In CI it does not depend on luck either: every run tries the same
# inputs, each test as many as it says. `make show-fuzz` tries others.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("laws", settings.get_profile("default"), **COMMON)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "laws")
if os.environ.get("CI"):  # Hypothesis also draws constants of our modules, but of those that earlier tests have loaded.
    providers._get_local_constants = lambda: providers._local_constants  # pyright: ignore[reportPrivateUsage]

# A shell lets what it runs in the background ignore SIGINT, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_FOLDERS = ("e2e", "faults", "nemo_rl")
SLOW_MODULES = (
    *("attacks", "audit", "benchmarks", "conformance", "curation", "from_git", "grading_twins", "honest", "prepare"),
    *("remote", "service_ray", "service_resume", "service_whole", "unconfined"),
)
"""Without `test_` and `.py`."""
KEPT = "episode"
"""The module of a slow folder that a plain `./test` runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run also what takes long, as CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless all tests are asked for or paths and names are given. Long modules come first:
    one that begins last would run alone."""
    root = config.rootpath / "tests"
    items.sort(key=lambda item: item.path.is_relative_to(root / "unit"))
    if config.getoption("--all") or os.environ.get("CI") or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    slow = {item for item in items if _is_slow(item.path.relative_to(root))}
    if slow:
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def _is_slow(path: Path) -> bool:
    module = path.stem.removeprefix("test_")
    return module in SLOW_MODULES or (path.parts[0] in SLOW_FOLDERS and module != KEPT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one table of the skipped tests: how many for each reason, which names what brings the part."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")
    if not (config.getoption("--all") or os.environ.get("CI")):
        terminalreporter.write_line("a plain run leaves out what takes long (see tests/conftest.py); all: ./test --all")


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return re.sub(r"\s+", " ", text.removeprefix("Skipped: "))
