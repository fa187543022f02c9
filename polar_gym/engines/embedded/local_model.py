"""A policy that is a local Hugging Face model, sampled in this process: small models without a server.

The logits are processed in vLLM's order (penalties, temperature, min-p, top-k, top-p), and a token's logprob is taken
from the distribution that it was drawn from. One thread does all the work, one answer after another; a cancelled call
stops at the next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, sampling_deviations
from polar_gym.engines import EngineError, Replay
from polar_gym.engines.embedded.answers import Piece, split_tags
from polar_gym.engines.embedded.chatml import parsed_arguments, text_content
from polar_gym.engines.embedded.experts import Routers, find_routers
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE, Generation, OnIds
from polar_gym.engines.sampling import truncating_fields
from polar_gym.record import RoutedExperts, TokenIds
from polar_gym.schema import Message, ReplayRecord, Sampling, ToolDefinition

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM."""


class LocalModelPolicy:
    def __init__(
        self, path: Path, max_model_len: int | None, device: str | None, dtype: str, record: Collection[ReplayRecord]
    ) -> None:
        self.tokenizer = str(path)
        self.max_model_len = max_model_len or 0
        self._path, self._device, self._dtype = path, device, dtype
        self._record = record
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-model")
        self._torch: Any = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._routers: Routers | None = None
        """None: no experts are recorded."""
        self._end_ids: set[int] = set()

    def load(self) -> None:
        try:
            self._torch = importlib.import_module("torch")
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise EngineError(
                503, f"engine.policy=transformers needs torch ({error}); pip install 'polar-gym[torch]'", kind="server"
            ) from error
        self._device = self._device or ("cuda" if self._torch.cuda.is_available() else "cpu")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise EngineError(
                503, f"engine.model_path={self._path}: no tokenizer there: {error}", kind="server"
            ) from error
        if not self._tokenizer.chat_template:
            raise EngineError(503, f"engine.model_path={self._path}: the tokenizer has no chat template", kind="server")
        model = transformers.AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype, local_files_only=True)
        self._model = model.to(self._device).eval()
        self.max_model_len = self.max_model_len or model.config.max_position_embeddings
        self._end_ids = _end_ids(model.generation_config.eos_token_id, self._tokenizer.eos_token_id)
        if "routed_experts" in self._record:
            self._routers = self._find_routers("engine.record=routed_experts")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def prompt_ids(self, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        prepared = [_for_template(message, index) for index, message in enumerate(messages)]
        return self._tokenizer.apply_chat_template(
            prepared, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[Piece]:
        spoken = ids[:-1] if ids and ids[-1] in self._end_ids else ids
        # No cleaning: with it, the text of more ids might not begin with the text of fewer ids.
        text = self._tokenizer.decode(spoken, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return split_tags(text)

    def _find_routers(self, purpose: str) -> Routers:
        try:
            return find_routers(self._torch, self._model)
        except ValueError as error:
            raise EngineError(400, f"{purpose}: engine.model_path={self._path}: {error}") from error

    async def replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._replay, ids, replay)

    def _replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        torch, vocabulary = self._torch, self._model.get_input_embeddings().num_embeddings
        if (largest := max(int(each.max(initial=0)) for each in (ids, *replay.kept))) >= vocabulary:
            raise EngineError(
                400,
                f"engine.model_path={self._path}: its {vocabulary} tokens do not include token {largest}: give the "
                "model that sampled the tokens",
            )
        tokens = torch.tensor(ids[: self.max_model_len].tolist(), device=self._device)
        with torch.inference_mode():
            with self._forced(replay.routed_experts, len(tokens)):
                logits = self._model(input_ids=tokens[None]).logits[0, :-1].float()
            logits /= torch.from_numpy(replay.temperature[1 : len(tokens), None]).to(logits.device)
            for row, kept in zip(logits, replay.kept[1 : len(tokens)], strict=True):
                if len(kept):
                    cut_off = torch.ones_like(row, dtype=torch.bool)
                    cut_off[torch.tensor(kept)] = False
                    row[cut_off] = -torch.inf
            logprobs = logits.log_softmax(-1)
        scored = logprobs.gather(-1, tokens[1:, None])[:, 0].cpu().numpy()
        return np.concatenate([np.full(1, np.nan, np.float32), scored])

    def _forced(self, experts: RoutedExperts | None, length: int) -> contextlib.AbstractContextManager[object]:
        """Force the experts in a pass over `length` ids. Raises `EngineError` where the model cannot have them."""
        if experts is None:
            return contextlib.nullcontext()
        routers = self._routers or self._find_routers("the routed experts of a trace")
        routers.check(experts)
        return routers.watched(experts[:length])

    async def generate(self, request: ChatRequest, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        if deviations := sampling_deviations(request):
            raise EngineError(
                400,
                f"{', '.join(deviations)}: engine=embedded has no grammars for policy=transformers; use engine=vllm",
                kind="invalid_request",
            )
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        tell = functools.partial(loop.call_soon_threadsafe, on_ids) if on_ids else None
        work = self._worker.submit(self._sample, request, sampling, cancelled, tell)
        sampled = asyncio.wrap_future(work)
        try:
            return _told(await asyncio.shield(sampled), on_ids)
        except asyncio.CancelledError:
            cancelled.set()
            if not work.cancel():
                _told(await sampled, on_ids)
            raise

    def _sample(
        self,
        request: ChatRequest,
        sampling: Sampling,
        cancelled: threading.Event,
        tell: Callable[[list[int], list[float]], object] | None,
    ) -> Generation:
        assert request.prompt_ids is not None
        assert request.max_tokens is not None
        torch, prompt_ids = self._torch, request.prompt_ids.tolist()
        generator = torch.Generator(self._device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        experts: list[RoutedExperts] = []
        cuts = "sampling_mask" in self._record and truncating_fields(sampling.model_dump())
        kept: list[TokenIds] | None = [] if cuts else None
        finish_reason, cache, inputs = "length", None, prompt_ids
        with torch.inference_mode():
            while len(ids) < request.max_tokens and not cancelled.is_set():
                with self._routers.recorded(experts) if self._routers else contextlib.nullcontext():
                    output = self._model(
                        input_ids=torch.tensor([inputs], device=self._device),
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                    )
                distribution = log_distribution(torch, output.logits[0, -1].float(), sampling, prompt_ids, ids)
                token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(distribution[token]))
                if kept is not None:
                    kept.append(distribution.isfinite().nonzero()[:, 0].to(torch.int32).cpu().numpy())
                if tell and len(ids) % TOKENS_AT_ONCE == 0:
                    tell(ids[-TOKENS_AT_ONCE:], logprobs[-TOKENS_AT_ONCE:])
                if token in self._end_ids or self._said(ids, request.stop):
                    finish_reason = "stop"
                    break
                cache, inputs = output.past_key_values, [token]
        rows = np.concatenate(experts)[request.routed_positions :] if experts else None
        return Generation(ids, logprobs, finish_reason, rows, kept)

    def _said(self, ids: list[int], stop: list[str]) -> bool:
        """Return whether the last token completed a stop string. A token has at least one byte, a character at most
        four."""
        if not stop:
            return False
        tail = self._tokenizer.decode(ids[-(4 * max(map(len, stop)) + 4) :], skip_special_tokens=False)
        return any(word in tail for word in stop)


def _told(generation: Generation, on_ids: OnIds | None) -> Generation:
    """Tell the last tokens of a generation, and return the generation."""
    if on_ids and (rest := len(generation.ids) % TOKENS_AT_ONCE):
        on_ids(generation.ids[-rest:], generation.logprobs[-rest:])
    return generation


def log_distribution(torch: Any, logits: Any, sampling: Sampling, prompt_ids: list[int], ids: list[int]) -> Any:
    """Return the logprobs of the next token under `sampling`, shape (vocabulary,); -inf for tokens that cannot be
    drawn."""
    logits = _penalised(torch, logits.clone(), sampling, prompt_ids, ids)
    if sampling.temperature < GREEDY_BELOW:
        certain = torch.full_like(logits, -torch.inf)
        certain[logits.argmax()] = 0.0
        return certain
    logits /= sampling.temperature
    if sampling.min_p > 0:
        logits[logits < logits.max() + torch.tensor(sampling.min_p).log().item()] = -torch.inf
    if sampling.top_k > 0 or sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        if sampling.top_k > 0:
            ordered[sampling.top_k :] = -torch.inf
        if sampling.top_p < 1:
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            ordered[before >= sampling.top_p] = -torch.inf
        logits = torch.empty_like(logits).scatter_(0, order, ordered)
    return logits.log_softmax(-1)


def _penalised(torch: Any, logits: Any, sampling: Sampling, prompt_ids: list[int], ids: list[int]) -> Any:
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([*prompt_ids, *ids], device=logits.device).unique()
        scores = logits[seen]
        logits[seen] = torch.where(
            scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        sampled = torch.tensor(ids, device=logits.device, dtype=torch.long)
        counts = torch.bincount(sampled, minlength=len(logits))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return logits


def _end_ids(*sources: int | list[int] | None) -> set[int]:
    return {
        token for source in sources if source is not None for token in ([source] if isinstance(source, int) else source)
    }


def _for_template(message: Message, index: int) -> dict[str, Any]:
    """Return the message as vLLM gives it to a model's template."""
    prepared = {**message, "content": text_content(message, index)}
    if message.get("reasoning"):
        prepared["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return prepared
