"""Scores a sample of the calls while sessions run: does a second pass of the engine give the captured logprobs again?

A pass runs in the background, so that no harness waits for it. The session waits for its passes before its traces are
built. A call whose logprobs differ too much masks its episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from polar_gym.chat import has_media
from polar_gym.config.run_config import ScoringConfig
from polar_gym.engines import ENGINES, Engine
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.schema import ModelCall, Sampling, Score

log = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""Calls with fewer sampled tokens are not scored: the mean of so few says little."""
PASS_SECONDS = 60.0
"""How long a pass may take. A session may wait that long for its last pass."""


class Scoring:
    """The scoring of a node's calls. Law: `read <= share * prefill`, apart from one call whenever a score was due."""

    def __init__(self, settings: ScoringConfig, gate: GenerationGate) -> None:
        self.references = {} if settings.reference is None else {"reference": ENGINES.make(settings.reference)}
        self.due = True
        """Whether the next call is scored at any cost: after the start, a weight update, a mismatch, and a pass that an
        update or the end of its session made void."""
        self.prefill = 0
        """Prompt tokens of all calls, without those that a spliced continuation took from its parent."""
        self.read = 0
        """Tokens of the prompts and answers of scored calls."""
        self._settings = settings
        self._gate = gate
        self._told = self._told_of_length = False

    def consider(
        self, call: ModelCall, known: int, engine: Engine, stamp: Callable[..., None]
    ) -> asyncio.Task[None] | None:
        """Count a recorded call, and return its pass where the call is chosen. `known`: how many tokens of the prompt
        are the parent's. `engine`: the one, or the replica, that sampled the call. `stamp`: keeps the call's scores."""
        self.prefill += len(call.prompt_ids) - known
        share, tokens = self._settings.share, len(call.prompt_ids) + len(call.response_ids)
        granted = share is not None and (self.due or self.read + tokens <= share * self.prefill)
        if not granted or not self._can_be_scored(call, engine) or self._too_long(tokens):
            return None
        shaped = Sampling.shaping(call.sampling)
        if shaped and engine.info.logprobs_mode != "raw":
            stamp(call, [Score(by="engine", problem=f"sampled with {', '.join(shaped)}")])
            return None
        self.due = False
        self.read += tokens
        return asyncio.create_task(self._score(call, engine, engine.weight_version, stamp))

    def mismatch(self, scores: Sequence[Score]) -> str | None:
        """Return the largest mean difference in words where it masks an episode, else None."""
        bound = self._settings.mask_above
        worst = max(scores, key=lambda score: score.mean_abs, default=Score(by="engine"))
        if worst.mean_abs <= bound:
            return None
        return (
            f"{worst.tokens} logprobs of a call differ from those that the {worst.by} computes by {worst.mean_abs:.3g} "
            f"nats in the mean, {worst.max_abs:.3g} at most (scoring.mask_above={bound:g}): look for a grammar or a "
            "logits processor in the engine's server, for its --logprobs-mode, and for stale weights or caches"
        )

    def _can_be_scored(self, call: ModelCall, engine: Engine) -> bool:
        """Return whether the weights that are set now sampled the whole call, freely and from ids alone."""
        spans = call.weight_versions
        current = all(span.until is None and engine.weight_version in (None, span.version) for span in spans)
        free = not call.sampling_mismatch and not any(map(has_media, call.messages)) and not engine.info.scripted
        return current and len(spans) <= 1 and not self._gate.paused and free and len(call.response_ids) >= LEAST_TOKENS

    def _too_long(self, tokens: int) -> bool:
        if tokens > self._settings.longest and not self._told_of_length:
            self._told_of_length = True
            log.warning(
                "calls of more than scoring.longest=%d tokens are not scored, e.g. one of %d: with memory for the "
                "logits of a longer prompt in the engine, raise it",
                self._settings.longest,
                tokens,
            )
        return tokens > self._settings.longest

    async def _score(self, call: ModelCall, engine: Engine, version: str | None, stamp: Callable[..., None]) -> None:
        """Have a call scored, whose engine had the weights `version` when the call was chosen."""
        tokens = len(call.prompt_ids) + len(call.response_ids)
        scores = [Score(by="engine", read=tokens, problem="cancelled")]
        try:
            if not self._gate.paused:
                async with self._gate.call():  # a pause is settled when the engine does no work
                    own = await self._pass("engine", engine, call)
                scores = [own, *[await self._pass(by, each, call) for by, each in self.references.items()]]
            if self._gate.paused or engine.weight_version != version:
                scores = [Score(by="engine", read=tokens, problem="weights_changed")]
        finally:
            mismatch = self.mismatch(scores)
            self.due |= mismatch is not None or scores[0].problem in ("cancelled", "weights_changed")
            if mismatch is not None and not self._told:
                self._told = True
                log.error("call %s: %s", call.call_id, mismatch)
            stamp(call, scores)

    async def _pass(self, by: str, engine: Engine, call: ModelCall) -> Score:
        ids = np.concatenate([call.prompt_ids, call.response_ids])
        try:
            async with asyncio.timeout(PASS_SECONDS):
                found = call.differences(await engine.score(ids))
            found = np.nan_to_num(found, nan=1e3, posinf=1e3)  # JSON has neither, and both must mask
            largest, mean = float(found.max()), float(found.mean())  # the first raises for a context that is too short
        except Exception as error:  # noqa: BLE001 - a pass that fails by any error costs its own score only
            log.warning("call %s could not be scored by the %s: %r", call.call_id, by, error)
            return Score(by=by, read=len(ids), problem=type(error).__name__)
        return Score(by=by, read=len(ids), tokens=len(found), mean_abs=mean, max_abs=largest)
