"""Forward passes over a prefix forest, for any code that calls a model with padded rows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from polar_gym.training import Row, to_torch
from polar_gym.training.conformance import Step, train_arrays
from polar_gym.training.forest import forest, packed
from polar_gym.training.row import inert_row


def row_of(token_ids: npt.ArrayLike, **fields: Any) -> Row:
    """Return a row of these tokens, of which none is trained."""
    ids = np.asarray(token_ids, np.int32)
    nothing = np.zeros(len(ids), np.float32)
    empty = {"loss_mask": nothing.astype(np.int8), "logprobs": nothing, "weights": nothing, "trace_id": "trace"}
    return replace(inert_row(), token_ids=ids, **empty | fields)


def seen(tree: dict[str, Any]) -> Any:
    """Return which token (axis 1) each token of a packed forest (axis 0) sees."""
    places = np.arange(len(tree["input_ids"]))
    return (places <= places[:, None]) & (places[:, None] < np.asarray(tree["seen_until"]))


def train_forest(model: Any, step: Step) -> None:
    """Run one step as `train_arrays` does, with the shared prefixes of each micro-batch once."""
    train_arrays(ForestForward(model), step)


class ForestForward:
    """A model that is called with padded rows, and runs each prefix that they share once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.savings: list[float] = []
        """How many times fewer tokens were run, call by call."""

    def parameters(self) -> Iterator[Any]:
        return self.model.parameters()

    def __call__(self, *, input_ids: Any, attention_mask: Any) -> Any:
        torch: Any = importlib.import_module("torch")
        rows = [row_of(ids[mask == 1].numpy()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        trees = forest(rows)
        self.savings.append(trees.saving)
        tree = packed(trees)
        mask = torch.from_numpy(seen(tree))
        tree = to_torch(tree)
        logits = self.model(
            input_ids=tree["input_ids"][None],
            position_ids=tree["position_ids"][None],
            attention_mask=mask[None, None],
        ).logits[0]
        places = torch.zeros_like(input_ids)
        places[:, : tree["places"].shape[1]] = tree["places"]
        return SimpleNamespace(logits=logits[places])
