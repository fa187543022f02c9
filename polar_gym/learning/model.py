"""Makes a small causal language model and its tokenizer, with random weights. Nothing is downloaded.

The tokenizer is a byte-level BPE that merges across words up to a line's end, trained on the harness's own prompts: so
their fixed parts become a few tokens. The units of names (`families`) are tokens that nothing is merged with.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_gym.engines.embedded.answers import TAGS
from polar_gym.engines.embedded.chatml import END_OF_TURN, TEMPLATE_FILE, TURN_TOKENS
from polar_gym.engines.embedded.options import CONTEXT_LENGTH
from polar_gym.learning.families import LETTERS, UNITS

VOCABULARY_SIZE = 16_384
"""The most tokens. The harness's prompts need fewer, as a rule: codex 2,200."""
HEAD = 32
"""The width of an attention head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a model. Two CPU cores train the default in minutes."""

    width: int = 96
    layers: int = 2

    @property
    def scale(self) -> float:
        """The learning rates relative to the default's: the inverse of the width (arXiv:2203.03466)."""
        return Size().width / self.width


PADDING = "<|endoftext|>"


def make_tokenizer(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a tokenizer of transformers with the embedded engine's chat template, trained on rows of chat messages.

    Text becomes one token only if it occurs half as often as the rows of one harness: a rarer one may be a random id.
    """
    tokenizers: Any = importlib.import_module("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"[{LETTERS}][0-9]"), "isolated"),
            tokenizers.pre_tokenizers.Split("\n", "merged_with_previous"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[*TURN_TOKENS, *TAGS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=min(Counter(row["harness"] for row in rows).values()) // 2,
        show_progress=False,
    )
    plain = _of_transformers(made)
    texts = [plain.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in rows]
    made.train_from_iterator([*texts, *["".join(UNITS)] * len(texts)], trainer)
    return _of_transformers(made)


def _of_transformers(made: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = TEMPLATE_FILE.read_text(encoding="utf-8")
    return tokenizer


def make_model(tokenizer: Any, seed: int, size: Size) -> Any:
    """Return a Qwen3 with random weights in float32, on a GPU where there is one."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        initializer_range=0.06 * size.scale**0.5,
        intermediate_size=size.width * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=max(4, size.width // HEAD),
        num_key_value_heads=max(4, size.width // HEAD),
        head_dim=HEAD,
        max_position_embeddings=CONTEXT_LENGTH,  # harnesses behave by it: that of the scripted demonstrations
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return on_gpu(transformers.Qwen3ForCausalLM(config).float())


def on_gpu(model: Any) -> Any:
    """Return the model, moved to a GPU where there is one."""
    torch: Any = importlib.import_module("torch")
    return model.to("cuda") if torch.cuda.is_available() else model


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
