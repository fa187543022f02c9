"""Asks swebench 4 about SWE-bench's tasks, in a separate environment: ours has swebench 5."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_gym.curation import CurationError, swebench_4
from polar_gym.workspaces.venv import VenvError, ensure_venv

REQUIREMENT = "swebench==4.1.0"
FIELDS = ("instance_id", "repo", "version", "base_commit", "test_patch")
"""The fields of a row that swebench 4 reads."""

_TIMEOUT_SECONDS = 1800


def specifications(rows: Sequence[dict[str, Any]], cache: Path) -> list[dict[str, str]]:
    """Return for each row `eval_script`, `log_parser`, `eval_type` and `image`, or `field` and `problem`.

    Blocks. The first call downloads swebench 4. Raises `CurationError`.
    """
    if not rows:
        return []
    try:
        python = ensure_venv([REQUIREMENT], cache) / "bin" / "python"
    except VenvError as error:
        raise CurationError(f"{REQUIREMENT}, which knows how SWE-bench's tests run, cannot be had: {error}") from error
    asked = "".join(json.dumps({name: row[name] for name in FIELDS}) + "\n" for row in rows)
    done = subprocess.run(
        [str(python), "-I", swebench_4.__file__],
        input=asked,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise CurationError(f"{REQUIREMENT} failed: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
