"""A model's tokenizer, for servers that do not turn ids into text: NeMo RL's has no `/detokenize`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from polar_gym.engines import EngineError


def local_tokenizer(name: str) -> Tokenizer:
    """`name`: a directory, a `tokenizer.json`, or a model on the Hugging Face Hub (or in its cache). Blocks. Raises
    `EngineError`."""
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower
        raise EngineError(
            400,
            f"engine.tokenizer={name!r}: no tokenizer there ({error}); NeMo RL's server does not turn ids into text: "
            "set engine.tokenizer to the model's directory or its tokenizer.json",
        ) from error
