"""A tiny language model that speaks like an agent: thinking, words, one or several tool calls, a broken one at times.

The architecture, tokenizer and template are those of `tiny_model`; it is trained for a minute on answers that this file
makes up. JSON is spaced and tokenised in many ways, so that almost nothing it says comes back to the same ids when its
words are templated again.

Needs torch and transformers. `python tests/support/trained_model.py DIRECTORY` writes it, from any interpreter that has
them.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_model import tiny_model, tiny_tokenizer  # run as a script, from its own folder

STEPS = 300
BATCH = 8
LENGTH = 256
LEARNING_RATE = 6e-3

NOUNS = ("file", "test", "line", "folder", "branch", "module", "result", "error", "café", "naïve case")
PATHS = ("main.py", "src/app.py", "README.md", "tests/a_test.py", "notes é.txt")
COMMANDS = ("ls -la", "cat main.py", "git status", 'echo \\"hi\\"', "python -m pytest -q", "wc -l README.md", "a\\nb")


def write_trained_model(directory: Path) -> None:
    """The same weights every time."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more are slower on so small a model, and add up in another order
    chance = random.Random(0)
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden_size=96, intermediate_size=256, initializer_range=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    stream = _Stream(tokenizer, chance)
    model.train()
    for step in range(STEPS):
        ids, labels = stream.batch(torch)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)  # noqa: T201
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


class _Stream:
    """Conversations as one endless row of ids; only answers have labels."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:
        self._tokenizer = tokenizer
        self._chance = chance
        self._ids: list[int] = []
        self._labels: list[int] = []

    def batch(self, torch: Any) -> tuple[Any, Any]:
        size = BATCH * LENGTH
        while len(self._ids) < size:
            self._add(_question(self._chance), learn=False)
            self._add(_answer(self._chance) + "<|im_end|>", learn=True)
        shape = (BATCH, LENGTH)
        ids, labels = (torch.tensor(row[:size]).reshape(shape) for row in (self._ids, self._labels))
        self._ids, self._labels = self._ids[size:], self._labels[size:]
        return ids, labels

    def _add(self, text: str, *, learn: bool) -> None:
        for piece in _cut(text, self._chance) if learn else [text]:
            ids = self._tokenizer.encode(piece, add_special_tokens=False)
            self._ids += ids
            self._labels += ids if learn else [-100] * len(ids)


def _cut(text: str, chance: random.Random) -> list[str]:
    """Pieces to be tokenised one by one, which gives other ids than the whole; tags stay whole."""
    places = [
        i for i in range(1, len(text)) if chance.random() < 0.03 and text.rfind("<", 0, i) <= text.rfind(">", 0, i)
    ]
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _question(chance: random.Random) -> str:
    role = chance.choice(("user", "tool", "tool"))
    words = chance.choice((_sentence, _output))(chance)
    return f"\n<|im_start|>{role}\n{words}<|im_end|>\n<|im_start|>assistant\n"


def _answer(chance: random.Random) -> str:
    thought = _thought(chance) if chance.random() < 0.7 else ""
    kind = chance.choices(("text", "calls", "text and calls"), (3, 4, 2))[0]
    parts = [thought]
    if kind != "calls":
        parts.append(" ".join(_sentence(chance) for _ in range(chance.randint(1, 3))) + chance.choice(("", "", "\n")))
    if kind != "text":
        parts += [_call(chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    return "".join(parts)


def _thought(chance: random.Random) -> str:
    edge = chance.choice(("", "\n"))
    return f"<think>{edge}{_sentence(chance)}{edge}</think>" + chance.choice(("", "\n", "\n\n"))


def _call(chance: random.Random) -> str:
    """A valid call, in one of the many ways of writing it down."""
    name, arguments = chance.choice(_TOOLS)(chance)
    colon, comma = chance.choice((":", ": ", ":  ")), chance.choice((",", ", ", ",  "))
    inner = comma.join(f'"{key}"{colon}{value}' for key, value in arguments)
    fields = [f'"name"{colon}"{name}"', f'"arguments"{colon}{{{inner}}}']
    edge, gap = chance.choice(("\n", "", " ")), chance.choice(("", "\n"))
    return f"<tool_call>{edge}{{{comma.join(fields)}}}{edge}</tool_call>{gap}"


def _bash(chance: random.Random) -> tuple[str, list[tuple[str, str]]]:
    arguments = [("command", f'"{chance.choice(COMMANDS)}"')]
    if chance.random() < 0.4:
        arguments.append(("timeout", chance.choice(("10", "1.0", "1e3", "60"))))
    return "bash", arguments


def _read(chance: random.Random) -> tuple[str, list[tuple[str, str]]]:
    path = json.dumps(chance.choice(PATHS), ensure_ascii=chance.random() < 0.5)
    return "read", [("path", path), ("limit", str(chance.randint(1, 99)))]


_TOOLS: tuple[Callable[[random.Random], tuple[str, list[tuple[str, str]]]], ...] = (_bash, _read)


def _sentence(chance: random.Random) -> str:
    verb, number = chance.choice(("has", "needs", "is")), chance.choice(("one", "no", "a new"))
    return f"The {chance.choice(NOUNS)}{chance.choice((' ', '  '))}{verb} {number} {chance.choice(NOUNS)}."


def _output(chance: random.Random) -> str:
    return "\n".join(f"{chance.choice(PATHS)}: {chance.randint(0, 999)}" for _ in range(chance.randint(1, 3)))


if __name__ == "__main__":
    write_trained_model(Path(sys.argv[1]))
