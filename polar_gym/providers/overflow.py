"""Finds the numbers in an engine's complaint of a prompt that is too long: clients look for them in a provider's words.

vLLM and SGLang word it differently from version to version.
"""

from __future__ import annotations

import re

_LIMIT = re.compile(r"context length (?:is (?:only )?|of |\()(\d+)")
_PROMPT = re.compile(r"(?:contains|has|passed) (?:at least )?(\d+) input tokens|input \((\d+) tokens\)")


def overflow(message: str) -> tuple[int | None, int | None]:
    """Return the length of the prompt and of the context, in tokens; None: the message does not name it."""
    prompt, limit = _PROMPT.search(message), _LIMIT.search(message)
    return int(prompt[1] or prompt[2]) if prompt else None, int(limit[1]) if limit else None
