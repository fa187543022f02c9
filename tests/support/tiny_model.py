"""A tiny language model with random weights: real architecture, real tokenizer, real chat template, no download.

Needs torch and transformers. `python tests/support/tiny_model.py DIRECTORY` writes it, from any interpreter that has
them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parents[2] / "polar_gym" / "engines" / "embedded"
CONTEXT_LENGTH = 32_768


def write_tiny_model(directory: Path) -> None:
    """A two-layer Qwen3 whose tokenizer and chat template are the embedded engine's; the same weights every time."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden_size=64, intermediate_size=128, initializer_range=0.2).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def tiny_tokenizer() -> Any:
    """The embedded engine's tokenizer and chat template, as `transformers` has them."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer


def tiny_model(tokenizer: Any, **sizes: Any) -> Any:
    """A two-layer Qwen3 with random weights."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **sizes,
    )
    return transformers.Qwen3ForCausalLM(config)


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
