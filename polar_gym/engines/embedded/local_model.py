"""A policy that is a local Hugging Face model, sampled in this process: small models without a server.

The logits are processed in vLLM's order (penalties, temperature, min-p, top-k, top-p), and a token's logprob is taken
from the distribution that it was drawn from. Answers are sampled together (`decoding`); a cancelled call stops at the
next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, sampling_deviations
from polar_gym.engines import EngineError, Replay
from polar_gym.engines.embedded.answers import Piece, split_tags
from polar_gym.engines.embedded.chatml import for_template
from polar_gym.engines.embedded.decoding import Answer, Decoder
from polar_gym.engines.embedded.experts import Routers, find_routers
from polar_gym.engines.embedded.options import CONTEXT_LENGTH, EmbeddedOptions
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE, Generation, OnIds
from polar_gym.engines.sampling import truncating_fields
from polar_gym.errors import how_to_install
from polar_gym.record import RoutedExperts
from polar_gym.schema import Message, Sampling, ToolDefinition

WORKER = "embedded-model"
"""How the name of a thread begins that runs a model."""


class LocalModelPolicy:
    def __init__(self, options: EmbeddedOptions) -> None:
        assert options.model_path is not None
        self.tokenizer = str(options.model_path)
        self.max_model_len = options.max_model_len or 0
        self._path, self._device, self._dtype = options.model_path, options.device, options.dtype
        self._record, self._slots = options.record, options.slots
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=WORKER)
        self._torch: Any = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._routers: Routers | None = None
        """None: no experts are recorded."""
        self._decoder: Decoder | None = None
        self._end_ids: set[int] = set()

    def load(self) -> None:
        try:
            self._torch = importlib.import_module("torch")
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise EngineError(
                503, f"engine.policy=transformers needs torch ({error}); {how_to_install('torch')}", kind="server"
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
        self._model = self._read_model(self._path).to(self._device).eval()
        self.max_model_len = self._context_length()
        self._end_ids = _end_ids(self._model.generation_config.eos_token_id, self._tokenizer.eos_token_id)
        if "routed_experts" in self._record:
            self._routers = self._find_routers("engine.record=routed_experts")
        self._decoder = Decoder(self._torch, self._model, self._worker, self._slots, self._routers)

    def _context_length(self) -> int:
        """Return the context length: the user's, else the model's own. Raises `EngineError` where the user's is longer
        than the model's, with its positions scaled where the config says so (YaRN)."""
        config = self._model.config.get_text_config()
        own = getattr(config, "max_position_embeddings", None)
        scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
        begun = scaling.get("original_max_position_embeddings") or own or 0
        most = own and max(own, int(begun * (scaling.get("factor") or 1)))
        if most is not None and self.max_model_len > most:
            raise EngineError(
                503,
                f"engine.max_model_len={self.max_model_len}: the model has {most} positions (max_position_embeddings, "
                f"and rope_scaling, in the config.json of engine.model_path={self._path}); set {most} or less, or null",
                kind="server",
            )
        return self.max_model_len or own or CONTEXT_LENGTH

    def close(self) -> None:
        self._worker.shutdown(wait=False)

    def prompt_ids(self, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        prepared = [for_template(message, index) for index, message in enumerate(messages)]
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
        assert self._decoder is not None
        loop = asyncio.get_running_loop()
        answer = Answer(
            request=request,
            sampling=sampling,
            ends=functools.partial(self._ends, request.stop),
            tell=functools.partial(loop.call_soon_threadsafe, on_ids) if on_ids else None,
            keep="sampling_mask" in self._record and bool(truncating_fields(sampling.model_dump())),
        )
        self._decoder.submit(answer)
        sampled = asyncio.wrap_future(answer.done)
        try:
            return _told(await asyncio.shield(sampled), on_ids)
        except asyncio.CancelledError:
            answer.cancelled.set()
            _told(await sampled, on_ids)
            raise

    async def set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        """See `polar_gym.engines.Updating`."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._set_weights, weights, version)

    def _set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        assert self._decoder is not None
        state = self._read_model(weights).state_dict() if isinstance(weights, Path) else weights
        self._decoder.set_weights(state, version)

    def _read_model(self, path: Path) -> Any:
        transformers = importlib.import_module("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype, local_files_only=True)

    def _ends(self, stop: list[str], ids: list[int]) -> bool:
        return ids[-1] in self._end_ids or self._said(ids, stop)

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


def _end_ids(*sources: int | list[int] | None) -> set[int]:
    return {
        token for source in sources if source is not None for token in ([source] if isinstance(source, int) else source)
    }
