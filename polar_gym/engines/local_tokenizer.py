"""A model's tokenizer on this machine, which turns ids into text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from polar_gym.engines import EngineError


def local_tokenizer(key: str, name: str) -> Tokenizer:
    """Return the tokenizer of a directory, a `tokenizer.json`, or a model on the Hugging Face Hub (or in its cache).

    `key` is the setting that holds the name. Blocks. Raises `EngineError`.
    """
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower
        raise EngineError(
            400,
            f"{key}={name!r}: no tokenizer there ({error}); set {key} to the model's directory or its tokenizer.json",
        ) from error
