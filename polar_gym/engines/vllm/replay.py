"""The sampler's choices in the answers of `/inference/v1/generate`, for trainers that replay them.

vLLM tells the kept token ids of each sampled token with its id, and the routed experts of all positions in the last
event (`--return-sampling-mask` and `--enable-return-routed-experts`, vLLM 0.32). Its streamed chat tells neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from polar_gym.engines import EngineError
from polar_gym.engines.sampling import truncating_fields
from polar_gym.record import RoutedExperts, experts_of
from polar_gym.schema import ReplayRecord, SamplingMask

FLAGS: dict[ReplayRecord, str] = {
    "routed_experts": "--enable-return-routed-experts",
    "sampling_mask": "--return-sampling-mask --logprobs-mode processed_logprobs",
}


class Choices:
    """Collects the wanted records of one answer, event by event."""

    def __init__(self, url: str, wanted: Collection[ReplayRecord]) -> None:
        self._url = url
        self._wanted = wanted
        self._experts: str | None = None
        self._kept: list[list[int]] = []

    def take(self, choice: dict[str, Any]) -> None:
        self._experts = choice.get("routed_experts") or self._experts
        self._kept += choice.get("sampling_mask") or []

    def routed_experts(self, prompt: int, response: int) -> RoutedExperts | None:
        """Return the experts of a whole answer, of which the engine ran `prompt + response - 1` positions. Raises
        `EngineError` where they are wanted and missing, or are not what vLLM documents."""
        if "routed_experts" not in self._wanted:
            return None
        try:
            rows = None if self._experts is None else experts_of(self._experts)
        except ValueError as error:
            raise self._wrong("routed_experts", str(error)) from error
        if rows is None or len(rows) >= prompt + response:
            told = "none" if rows is None else f"{rows.dtype} {rows.shape} for {prompt} + {response} tokens"
            raise self._wrong("routed_experts", told)
        return rows

    def sampling_mask(self, response: int, sampling: dict[str, Any]) -> SamplingMask | None:
        """Return the sets of a whole answer; None where `sampling` cuts no token off, and each set is the vocabulary.
        Raises `EngineError` where they are wanted and missing."""
        if "sampling_mask" not in self._wanted:
            return None
        if len(self._kept) != response:
            raise self._wrong("sampling_mask", f"{len(self._kept)} sets for {response} tokens")
        return SamplingMask.of(self._kept) if truncating_fields(sampling) else None

    def _wrong(self, name: ReplayRecord, told: str) -> EngineError:
        return EngineError(
            502, f"engine.record={name}: {self._url} answered with {told}; start vLLM with {FLAGS[name]}"
        )
