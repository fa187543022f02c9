"""The experts that the routers of a mixture-of-experts model choose: recorded, and forced.

In transformers, a module with a child `experts` is an MoE layer. Its router takes the `torch.topk` of one score for
each expert, and computes weights for the chosen experts. Forced experts take the place of the result of that `topk`,
and the router's own code computes their weights. A model whose routers choose in another way is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar_gym.engines import EngineError
from polar_gym.record import RoutedExperts


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model's MoE layers."""

    torch: Any
    model: str
    """The name of the model's class."""
    layers: int
    experts: int
    """How many experts each layer has."""
    top_k: int = 0
    """How many of them each router chooses."""

    @contextmanager
    def watched(self, forced: RoutedExperts | None = None) -> Iterator[list[Any]]:
        """Yield a list that gets the choices of each layer, shape (positions, top_k), in one pass of the model in the
        context. `forced` are the choices at the first positions of the pass."""
        torch, choices, experts = self.torch, [], self.experts
        rows = None if forced is None else torch.from_numpy(forced.astype(np.int64))

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != experts:
                    return result
                chosen = result.indices
                if rows is not None:
                    chosen = torch.cat([rows[:, len(choices)].to(chosen.device), chosen[len(rows) :]])
                choices.append(chosen)
                return torch.return_types.topk((args[0].gather(1, chosen), chosen))

        with Watch():
            yield choices

    @contextmanager
    def recorded(self, rows: list[RoutedExperts]) -> Iterator[None]:
        """Add the choices of the passes of the model in the context to `rows`, shape (positions, layers, top_k), the
        positions of one pass after those of the pass before."""
        with self.watched() as choices:
            yield
        count = self.layers
        passes = [self.torch.stack(choices[at : at + count], 1) for at in range(0, len(choices), count)]
        rows.append(self.torch.cat(passes).cpu().numpy().astype(np.min_scalar_type(self.experts - 1)))

    def check(self, forced: RoutedExperts) -> None:
        """Raise `EngineError` for choices that another model's routers made."""
        lowest, highest = forced.min(initial=0), forced.max(initial=0)
        if forced.shape[1:] != (self.layers, self.top_k) or lowest < 0 or highest >= self.experts:
            raise EngineError(
                400,
                f"the routed experts are of {forced.shape[1]} layers, {forced.shape[2]} for each, with numbers from "
                f"{lowest} to {highest}; {self.model} has {self.layers} MoE layers, each of which chooses {self.top_k} "
                f"of {self.experts} experts: give the model that sampled the tokens",
            )


def find_routers(torch: Any, model: Any) -> Routers:
    """Return the routers of a model, which runs one token to find them. Raises `ValueError` where there are none, or
    where they choose in a way that cannot be read."""
    name = type(model).__name__
    layers = [dict(module.named_children()).get("experts") for module in model.modules()]
    counts = [getattr(layer, "num_experts", 0) for layer in layers if layer is not None]
    if not counts:
        raise ValueError(f"{name} has no MoE layers")
    routers = Routers(torch, name, len(counts), counts[0])  # a layer with another number makes no choice among them
    with torch.inference_mode(), routers.watched() as choices:
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    chosen = {choice.shape for choice in choices}
    if len(choices) != len(counts) or len(chosen) != 1:
        raise ValueError(
            f"the routers of {name} are not understood: {len(counts)} MoE layers made {len(choices)} choices by "
            f"torch.topk among {counts[0]} experts"
        )
    return replace(routers, top_k=choices[0].shape[1])
