"""Searches a text for a regular expression of a request.

Python's `re` can need exponential time, and lets no other code of its process run meanwhile. Therefore the search runs
in a separate process, which is killed at a deadline.
"""

from __future__ import annotations

import json
import sys

from polar_gym.evaluators import EvaluatorError
from polar_gym.runtimes import processes

SEARCH_SECONDS = 30.0
"""How long a search may take. A usual one takes some 20 ms, most of them for the start of the process."""

_PROGRAM = """
import json, re, sys
pattern, text = json.load(sys.stdin)
print(re.search(pattern, text, re.MULTILINE) is not None)
"""


async def found(pattern: str, text: str) -> bool:
    """Return whether a text has a match; `^` and `$` match at lines. Raises `TimeoutError` and `EvaluatorError`."""
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    code, stdout, stderr = await processes.run(argv, json.dumps([pattern, text]).encode(), SEARCH_SECONDS)
    if code != 0:
        raise EvaluatorError(f"the search for {pattern[:200]!r} failed: {stderr.decode(errors='replace')[-2000:]}")
    return stdout.strip() == b"True"
