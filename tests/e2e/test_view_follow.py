"""`polar-gym view` without --out: the page on the loopback interface gets episodes as they are written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import browsing
from tests.support.made_runs import made_session, write_run


@contextmanager
def viewing(*arguments: str) -> Iterator[str]:
    """Run the command, and yield the URL that it says. Ctrl-C ends it."""
    command = [sys.executable, "-c", "from polar_gym.cli import main; main()", "view", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.match(r"(http://127\.0\.0\.1:\d+/) ", process.stderr.readline())
            assert found is not None
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    assert process.returncode == 130


def test_episodes_come_while_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    lines = [made_session(0, sample, tmp_path).to_json() + b"\n" for sample in range(4)]
    with viewing(str(file)) as url, browsing() as browser:
        browser.driver.get(url)
        for number, line in enumerate(lines, start=1):
            with file.open("ab") as run:  # a line comes in two parts
                run.write(line[:1000])
                run.flush()
                run.write(line[1000:])
            told = f"{number} session{'s' if number > 1 else ''}"
            browser.wait("return document.querySelector('#shown')?.innerText === arguments[0]", told)
        browser.go("#e=3&tab=tokens&token=5")
        assert "position\n5\n" in browser.text(".detail")
        write_run(tmp_path / "other.jsonl", iter([])).rename(file)
        browser.wait("return document.querySelector('.note-bar').innerText.includes('has taken its place')")
        assert browser.errors() == []


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_other_pages_are_refused(headers: dict[str, str], tmp_path: Path) -> None:
    with viewing(str(tmp_path / "run.jsonl")) as url:
        for path in ("", "episodes"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(url + path, headers=headers))
