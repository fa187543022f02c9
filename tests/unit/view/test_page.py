"""The page's code is what its source makes, is small, and runs nothing but itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

from polar_gym.view.page import HERE, head
from tests.support.requirements import need_node

WEB = Path(__file__).parents[3] / "web"
MOST = 150_000
"""Bytes of the page's code, compressed."""


def test_the_bundle_is_what_the_checked_source_makes(tmp_path: Path) -> None:
    need_node()
    made = tmp_path / "polar_gym" / "view"
    made.mkdir(parents=True)
    shutil.copytree(WEB, tmp_path / "web", ignore=shutil.ignore_patterns("node_modules"))
    for command in ("ci --no-audit --no-fund", "run check", "run build"):
        done = subprocess.run(["npm", *command.split()], cwd=tmp_path / "web", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("page.js", "live.js", "page.css"):
        assert (made / name).read_bytes() == (HERE / name).read_bytes(), "cd web && npm ci && npm run build"


def test_the_code_is_small_and_ends_no_element_early() -> None:
    assert len(zlib.compress(head(follows=False))) < MOST
    for name in ("page.js", "live.js"):
        assert not re.search("<(/?script|!--)", (HERE / name).read_text(), re.IGNORECASE)
    style = (HERE / "page.css").read_text()
    assert "</style" not in style


def test_the_source_makes_no_markup_out_of_text() -> None:
    source = "".join(path.read_text() for path in (WEB / "src").glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)


def test_only_a_page_that_follows_may_fetch() -> None:
    still, following = (head(follows=follows).decode() for follows in (False, True))
    assert "connect-src 'none'" in still
    assert "connect-src 'self'" in following
    assert "default-src 'none'" in still
