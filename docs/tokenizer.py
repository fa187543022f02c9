"""Train the embedded engine's `tokenizer.json` on the standard library's sources and on our chat template.

    python docs/tokenizer.py

The result is deterministic for one Python version, `TRAINED_WITH`: the corpus is read in sorted order. Byte-level BPE
knows every byte, so any text survives encoding and decoding unchanged. The tags of thinking and tool calls are added
tokens but not "special" ones, as in Qwen's tokenizers, so that decoding keeps them.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from polar_gym.engines.embedded.answers import TAGS
from polar_gym.engines.embedded.chatml import TEMPLATE_FILE, TOKENIZER_FILE, TURN_TOKENS

VOCABULARY_SIZE = 4096
TRAINED_WITH = (3, 13)
TEMPLATE_WEIGHT = 200
"""How often the template is shown, so that its words become whole tokens."""


def corpus() -> Iterator[str]:
    """Yield the top-level modules of the standard library, then the template."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8")
    template = TEMPLATE_FILE.read_text(encoding="utf-8")
    for _ in range(TEMPLATE_WEIGHT):
        yield template


def train() -> str:
    """Return the trained tokenizer as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[*TURN_TOKENS, *TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in TURN_TOKENS
    return json.dumps(description, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    if sys.version_info[:2] != TRAINED_WITH:
        sys.exit(f"the shipped tokenizer is trained with Python {'.'.join(map(str, TRAINED_WITH))}; run it with that")
    TOKENIZER_FILE.write_text(train() + "\n", encoding="utf-8")
