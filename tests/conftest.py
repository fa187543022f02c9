"""Shared fixtures and settings."""

import os
import re
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.support.docker_daemon import docker_host

__all__ = ["docker_host"]

# A law does not depend on how busy the machine is. In CI it does not depend on luck either: every run tries the same
# inputs, each test as many as it says. `make show-fuzz` tries others.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("laws", settings.get_profile("default"), **COMMON)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "laws")

# A shell lets what it runs in the background ignore SIGINT, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = ("e2e", "faults", "nemo_rl")
"""Folders that a plain `./test` leaves out, but for the tests of `KEPT`."""
KEPT = "test_episode.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"run also the folders {', '.join(SLOW)}, as CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow folders, unless all tests are asked for or paths and names are given."""
    if config.getoption("--all") or os.environ.get("CI") or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    root = config.rootpath / "tests"
    slow = {item for item in items if item.path.name != KEPT and item.path.relative_to(root).parts[0] in SLOW}
    if slow:
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one table of the skipped tests: how many for each reason, which names what brings the part."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")
    if not (config.getoption("--all") or os.environ.get("CI")):
        terminalreporter.write_line(f"a plain run leaves out {', '.join(SLOW)} of tests/; all tests: ./test --all")


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return re.sub(r"\s+", " ", text.removeprefix("Skipped: "))
