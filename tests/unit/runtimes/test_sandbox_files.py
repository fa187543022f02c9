"""Messages about what a machine lacks."""

from __future__ import annotations

import logging
import threading

import pytest

from polar_gym.runtimes.sandbox_files import say_once


def test_two_sandboxes_that_come_up_together_say_once_what_lacks() -> None:
    """Guards against a message for each of several threads that begin before the first has said it."""
    said: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        if len(said) == 1:
            other = threading.Thread(target=say_once, args=("it lacks groups",))
            other.start()
            other.join()
        return False

    logger = logging.getLogger("polar_gym.runtimes.sandbox_files")
    logger.addFilter(hear)
    try:
        say_once("it lacks groups")
        say_once("it lacks groups")
    finally:
        logger.removeFilter(hear)
    assert said == ["it lacks groups"]


def test_a_lack_is_said_once_though_its_text_names_each_sandbox(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "other"):
        say_once(f"no disk for {name}", "a test's disk")
    assert [record.getMessage() for record in caplog.records] == ["no disk for one"]
