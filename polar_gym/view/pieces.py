"""Token ids as text, one piece for each id."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
"""Decoders put it where an id is a part of a character only."""

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Character -> byte in the vocabularies of byte-level BPE (GPT-2's `bytes_to_unicode`)."""


class Pieces:
    """Gives the text of ids, each id once: a page keeps what it was told."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._told: set[int] = set()

    def new(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of the ids that no earlier call was about. An id outside of the vocabulary has none."""
        fresh = sorted(set(ids) - self._told)
        self._told.update(fresh)
        said = self._tokenizer.decode_batch([[each] for each in fresh], skip_special_tokens=False)
        names = map(self._tokenizer.id_to_token, fresh)
        return {
            each: _piece(text, name) for each, text, name in zip(fresh, said, names, strict=True) if name is not None
        }


def _piece(text: str, name: str) -> str:
    """Return the text of an id. Bytes that are no character by themselves are shown as `\\xe2`."""
    if UNFINISHED in text:
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return rf"\x{name[3:5].lower()}"
        if name and all(character in BYTES for character in name):
            return "".join(rf"\x{BYTES[character]:02x}" for character in name)
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text
