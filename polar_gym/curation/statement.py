"""Writes the instruction of a task that was made from a commit: out of an issue that its message names, by a model, or
out of the message.

Lines of the solution are taken out of people's words. A model's words that hold one are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polar_gym.curation import CurationError
from polar_gym.curation.issue import NOISE, behaviours, callers, phrase
from polar_gym.curation.releases import Comparison
from polar_gym.durable import json_lines
from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.errors import ConfigError

PATIENCE_SECONDS = 120.0
LONGEST = 24_000
"""Characters of a patch that a model is shown."""
FEW_WORDS = 8
"""A message of fewer words says too little: the failing tests' names are added."""
ADVICE = """You write the text of an issue for a code repository, as a user of the project would report it. The user's \
message shows a commit and the tests that it mends. Describe the behaviour that is wrong or missing, how to see it and \
what is expected, so that somebody who does not know the commit can write code that passes these tests. Do not say \
how to change the code, and show no code of the change. Answer with the issue alone: a title in the first line, an \
empty line, and the text."""

_TRAILER = re.compile(
    r"^(signed-off-by|co-authored-by|reviewed-by|acked-by|tested-by|reported-by|change-id|git-svn-id|backport\w*|cc)\b.*"
    r"|^(\(?cherry picked from|merge (pull request|branch|remote|tag|commit)|pull request).*"
    r"|^\W*(fix(es|ed)?|clos(es|ed)?|resolv(es|ed)?|refs?|see( also)?|related)\W+(#|gh-|https?:)\S+[\s,.]*$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A model that writes issues, behind OpenAI's Chat Completions."""

    url: str
    model: str
    key: str | None = None

    async def write(self, message: str, patch: str, failing: Mapping[str, str]) -> str:
        """Return the text of an issue. Raises `CurationError`."""
        shown = (
            f"The commit's message:\n{message}\n\nThe change:\n{patch[:LONGEST]}\n\nThe tests:\n{behaviours(failing)}"
        )
        messages = [{"role": "system", "content": ADVICE}, {"role": "user", "content": shown}]
        http = Http("the writer", self.url, self.key, PATIENCE_SECONDS)
        http.open()
        try:
            answer = await http.post("/v1/chat/completions", {"model": self.model, "messages": messages}, long=True)
            text = answer["choices"][0]["message"]["content"]
        except (EngineError, LookupError, TypeError) as error:
            raise CurationError(f"the model {self.model} at {self.url} wrote no issue: {error}") from error
        finally:
            await http.close()
        if not isinstance(text, str) or not text.strip():
            raise CurationError(f"the model {self.model} at {self.url} wrote no issue: its answer is empty")
        if told := solution_lines(text, patch):
            raise CurationError(f"the model {self.model} tells a line of the solution: {told[0]}")
        return text.strip()


def read_issues(path: Path) -> dict[int, str]:
    """Return number -> text of the issues in a JSONL file with `number`, `title` and `body`. Raises `ConfigError`."""
    issues: dict[int, str] = {}
    try:
        with path.open("rb") as lines:
            for place, row in json_lines(lines, path):
                number, title, body = row.get("number"), row.get("title"), row.get("body")
                if not isinstance(number, int) or not isinstance(title, str):
                    raise ConfigError(
                        f"{place}: number, title: expected a number and a text, got {number!r}, {title!r}"
                    )
                issues[number] = f"{title}\n\n{body or ''}".strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the issues: {error.strerror}") from error
    return issues


async def write_statement(
    message: str,
    old: Path,
    new: Path,
    comparison: Comparison,
    failing: Mapping[str, str],
    issues: Mapping[int, str],
    writer: Writer | None,
) -> tuple[str, str]:
    """Return the problem statement and the name of its source. Raises `CurationError`."""
    more = callers(old, new, comparison.test_patch)
    named = [
        issues[number]
        for number in map(int, re.findall(r"(?:#|gh-)(\d+)\b", message, re.IGNORECASE))
        if number in issues
    ]
    if named:
        return f"{without_solution(named[0], comparison.patch)}{more}\n", "issue"
    if writer is not None:
        return f"{await writer.write(cleaned(message), comparison.patch, failing)}{more}\n", "model"
    text = without_solution(cleaned(message), comparison.patch)
    if len(re.findall(r"\w+", text)) < FEW_WORDS:
        text = f"{text or phrase(next(iter(failing)))}\n\n{behaviours(failing)}"
    return f"{text}{more}\n", "commit message"


def cleaned(message: str) -> str:
    """Return a commit's message without trailers, credits, links and lines that only a host of repositories makes."""
    kept: list[str] = []
    for line in message.strip().splitlines():
        if _TRAILER.match(line.strip()):
            continue
        for pattern, replacement in NOISE:
            line = pattern.sub(replacement, line)
        kept.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def without_solution(text: str, patch: str) -> str:
    """Return a text without the lines that hold a line which the patch adds."""
    told = solution_lines(text, patch)
    return "\n".join(line for line in text.splitlines() if not any(each in line for each in told)).strip()


def solution_lines(text: str, patch: str) -> list[str]:
    """Return the longer lines that the patch adds and that the text holds."""
    added = re.findall(r"^\+(?!\+\+ )[ \t]*(\S.{28,}\S)", patch, re.MULTILINE)
    return [line for line in dict.fromkeys(added) if line in text]
