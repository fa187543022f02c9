"""The keys and values of a model's attention, in slots: one for each answer that is being sampled.

A slot keeps its content after its answer has ended. A prompt that begins with ids of a slot takes their keys and values
from there, so that only the ids after them are computed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_gym.record import common_prefix

CAPACITY = 256
"""The number of ids for which a slot has space at first."""


class Caches(Protocol):
    """The state of a model between the passes of several answers."""

    def begin(self, ids: Sequence[int], most: int) -> tuple[int, int, Any]:
        """Run a prompt. Return the slot of its answer, how many of the first ids were known (`most` at most), and the
        logits after the last id, shape (vocabulary,)."""
        ...

    def step(self, slots: Sequence[int], tokens: Sequence[int]) -> Any:
        """Add one token to each answer, and return the logits after these tokens, shape (answers, vocabulary)."""
        ...

    def again(self, slot: int, ids: Sequence[int]) -> None:
        """Run the ids of an answer again, with other weights."""
        ...

    def end(self, slot: int) -> None:
        """Make the slot of an answer free."""
        ...

    def forget(self) -> None:
        """Make the content of all slots unknown: the weights have changed."""
        ...


def caches(torch: Any, model: Any, count: int) -> Caches:
    """Return the caches of `count` answers, for the kind of the model's attention."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
    plain = plain and getattr(model, "_supports_attention_backend", False)  # others may not take the mask of `Slots`
    return Slots(torch, model, count) if plain else Separate(torch, model)


class Slots:
    """Caches of a model all of whose layers attend to the whole context. A step is one pass for all answers."""

    def __init__(self, torch: Any, model: Any, count: int) -> None:
        self._torch, self._model = torch, model
        self._held: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * count
        """The ids whose keys and values are in each slot."""
        self._free = list(range(count))
        """The least recently used one first."""
        self._stored: list[list[Any]] = []
        """Keys and values of each layer, shape (slots, heads, capacity, size)."""
        self._pass: Any = _make_cache(self)
        self._name = _cache_name(model)
        self._at: tuple[Any, Any, int] = (None, None, 0)
        """Slots and positions of the tokens of the pass, and the length of its longest sequence."""

    def begin(self, ids: Sequence[int], most: int) -> tuple[int, int, Any]:
        own = np.asarray(ids, np.int64)
        shared = [common_prefix(held, own) for held in self._held]
        source = int(np.argmax(shared))
        known = min(shared[source], most, len(own) - 1)
        slot = source if source in self._free and shared[source] == len(self._held[source]) else self._free[0]
        self._held[slot] = own[:0]  # until the pass has ended
        for layer in self._stored:
            for tensor in layer:
                if slot != source:
                    tensor[slot, :, :known] = tensor[source, :, :known]
                tensor[slot, :, known:] = 0  # a mask hides no nan
        logits = self._run([slot], own[None, known:], np.array([known]))[0]
        self._held[slot] = own
        self._free.remove(slot)
        return slot, known, logits

    def step(self, slots: Sequence[int], tokens: Sequence[int]) -> Any:
        lengths = np.array([len(self._held[slot]) for slot in slots])
        logits = self._run(slots, np.array(tokens)[:, None], lengths)
        for slot, token in zip(slots, tokens, strict=True):
            self._held[slot] = np.append(self._held[slot], token)
        return logits

    def again(self, slot: int, ids: Sequence[int]) -> None:
        own = np.asarray(ids, np.int64)
        self._run([slot], own[None], np.array([0]))
        self._held[slot] = own

    def end(self, slot: int) -> None:
        self._free.append(slot)

    def forget(self) -> None:
        self._held = [np.empty(0, np.int64)] * len(self._held)

    def _run(self, slots: Sequence[int], tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> Any:
        """Run the tokens, shape (answers, n), which begin at `starts`. Return the logits after the last of each."""
        torch, device = self._torch, self._model.device
        positions = torch.from_numpy(starts[:, None] + np.arange(tokens.shape[1])).to(device)
        longest = int(starts.max()) + tokens.shape[1]
        self._at = torch.tensor(list(slots), device=device), positions, longest
        self._pass.length = longest - tokens.shape[1]
        hidden = torch.arange(longest, device=device) > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=device)
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(device),
            position_ids=positions,
            attention_mask=mask.masked_fill(hidden, torch.finfo(mask.dtype).min),
            use_cache=True,
            logits_to_keep=1,
            **{self._name: self._pass},
        )
        return output.logits[:, -1]

    def store(self, layer: int, *states: Any) -> tuple[Any, ...]:
        """Take the keys and values of the pass in a layer, shape (answers, heads, n, size). Return those of the whole
        sequences."""
        slots, positions, longest = self._at
        if layer == len(self._stored):
            self._stored.append([self._empty(state) for state in states])
        for number, state in enumerate(states):
            if self._stored[layer][number].shape[2] < longest:
                self._stored[layer][number] = self._longer(self._stored[layer][number], longest)
            self._stored[layer][number][slots[:, None], :, positions] = state.transpose(1, 2)
        return tuple(tensor[slots, :, :longest] for tensor in self._stored[layer])

    def _empty(self, state: Any) -> Any:
        _, heads, _, size = state.shape
        return state.new_zeros((len(self._held), heads, CAPACITY, size))

    def _longer(self, tensor: Any, length: int) -> Any:
        capacity = CAPACITY * 2 ** int(np.ceil(np.log2(length / CAPACITY)))
        return self._torch.nn.functional.pad(tensor, (0, 0, 0, capacity - tensor.shape[2]))


def _cache_name(model: Any) -> str:
    """Return the name of the cache among a model's arguments and results, which transformers 5.24 renamed in part."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _make_cache(slots: Slots) -> Any:
    """Return the object by which a model of transformers reads and writes the slots."""
    base: Any = importlib.import_module("transformers").DynamicCache

    class SlotCache(base):
        length = 0

        def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, ...]:
            return slots.store(layer, keys, values)

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return self.length

    return SlotCache()


class Separate:
    """Caches of any model: each answer has one of transformers' own, and a step is one pass for each answer."""

    def __init__(self, torch: Any, model: Any) -> None:
        self._torch, self._model, self._name = torch, model, _cache_name(model)
        self._own: dict[int, Any] = {}

    def begin(self, ids: Sequence[int], most: int) -> tuple[int, int, Any]:
        slot = max(self._own, default=-1) + 1
        return slot, 0, self._run(slot, ids)

    def step(self, slots: Sequence[int], tokens: Sequence[int]) -> Any:
        return self._torch.stack([self._run(slot, [token]) for slot, token in zip(slots, tokens, strict=True)])

    def again(self, slot: int, ids: Sequence[int]) -> None:
        del self._own[slot]
        self._run(slot, ids)

    def end(self, slot: int) -> None:
        self._own.pop(slot, None)

    def forget(self) -> None:
        """Do nothing: no content outlives its answer."""

    def _run(self, slot: int, ids: Sequence[int]) -> Any:
        tokens = self._torch.tensor([list(ids)], device=self._model.device)
        cache = {self._name: self._own.get(slot)}
        output = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache)
        self._own[slot] = output[self._name]
        return output.logits[0, -1]
