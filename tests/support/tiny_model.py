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


MOE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4},
    "MiniMaxM2": {"num_local_experts": 8},
    "Phimoe": {"num_local_experts": 4},
}
"""Families of mixture-of-experts models, with the fields of their configs. Phimoe's routers use no `topk`."""


def write_tiny_moe(directory: Path, family: str, **more: Any) -> None:
    """A two-layer mixture-of-experts model of a family of `MOE`, with random weights: the same every time. `more` are
    fields of its config."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **MOE[family],
        **more,
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
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


def tiny_gpt2() -> Any:
    """A one-layer GPT-2 in float64 with 32 tokens and random weights: every part of its sums is in float64."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off)).double()


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
