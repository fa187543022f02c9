"""The documentation builds as a site: every link and anchor leads somewhere, and every page is in the navigation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from polar_gym.http import server_routes

CHECKOUT = Path(__file__).parents[2]


def test_the_site_builds(tmp_path: Path) -> None:
    """Guards against dead links between pages, and references that were not made."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "unmodified" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    reference = tmp_path / "site" / "reference"
    assert "rollout.num_samples" in (reference / "config.html").read_text(encoding="utf-8")
    assert server_routes.SUBMIT.path in (reference / "http.html").read_text(encoding="utf-8")
    assert "callback_url" in (reference / "python.html").read_text(encoding="utf-8")
