"""Shell text that holds other text."""

from __future__ import annotations

import string


def heredoc(text: str) -> str:
    """Return a shell here-document that feeds exactly `text` (with a newline at its end) to a command.

    No line of it begins as the delimiter does: dash drops a byte of a non-ASCII character that follows a part of it.
    Raises `ValueError` for a text whose lines begin with every letter there is: no patch's do.
    """
    body = text if text.endswith("\n") else text + "\n"
    taken = {line[:1] for line in body.split("\n")}
    letter = next((letter for letter in string.ascii_uppercase if letter not in taken), None)
    if letter is None:
        raise ValueError("the text's lines begin with every capital letter; no here-document can hold it")
    return f"<<'{letter}END'\n{body}{letter}END"
