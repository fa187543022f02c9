"""vLLM behind a URL, asked for ids with `return_token_ids`.

Two paths lead to the same answers. `chat` sends a spliced prompt along with `/v1/chat/completions`, in a field that
only vLLM has and that replaces templating. `generate` is made for ids (module `generate`). The start-up probe picks
`chat` where the server honours that field, else `generate`, else `plain`, which is chat without splicing. Requests with
images always go to chat: their prompts are never spliced.

NeMo RL's server (`prefix_field: required_prefix_token_ids`) has the routes for chat and `/tokenize`, and no others. It
refuses every sampling except the one that it trains with, and so it is not probed. The settings name the model, the
context length comes with the ids of a template, and the model's tokenizer turns ids into text.

Every sampling field is sent explicitly, because vLLM fills in the model's defaults for absent ones. vLLM accepts
unknown fields in silence. An engine that is too old to return ids shows only in its answers, so each answer is checked.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from polar_gym.chat import ChatRequest, Completion, OnDelta, has_media
from polar_gym.engines import EngineError
from polar_gym.engines.context_length import leaves_no_space, no_space, within_the_space
from polar_gym.engines.http import SMALL_SECONDS, Body, Http
from polar_gym.engines.local_tokenizer import local_tokenizer
from polar_gym.engines.openai_form import (
    CHAT,
    ServerOptions,
    as_ids,
    chat_body,
    check_normalised,
    context_length,
    served_model,
)
from polar_gym.engines.replicas import Replicas
from polar_gym.engines.sampling import logprobs_problem, sampling_fields
from polar_gym.engines.vllm.generate import answer_by_ids, lacks_call, read_again, uncertain_call, unusable
from polar_gym.engines.vllm.own_grammar import own_grammar, warn_of_own_grammar, warn_of_unknown_grammar
from polar_gym.engines.vllm.prompt_echo import Sent
from polar_gym.engines.vllm.stream import StreamedAnswer, abort_route, ask, ids_and_logprobs, prompt_ids
from polar_gym.engines.vllm.weights import paused, reload
from polar_gym.engines.weights import after_failure
from polar_gym.schema import EngineInfo, Message, OwnGrammar, ReplayRecord, Sampling, ToolDefinition

log = logging.getLogger(__name__)

READ_ALONG_INTERVAL = 8
PROBE_TOP_LOGPROBS = 10
PROBE_TOP_K = 2
"""Fewer than the tokens that are listed, because tokens as likely as the last one are kept too."""
PROBE: list[Message] = [{"role": "user", "content": "ping"}]


class VllmOptions(ServerOptions):
    path: Literal["auto", "chat", "generate"] = "auto"
    """How calls reach the engine. `generate` needs a server with `--enable-scale-out`. It tells weight versions also
    before vLLM 0.33, and gives the text of an answer as one piece also where streaming is asked for."""
    prefix_field: Literal["kv_transfer_params", "required_prefix_token_ids"] = "kv_transfer_params"
    """How chat takes a spliced prompt. Stock vLLM takes all of it. NeMo RL's server takes the ids up to the end of the
    last answer, and templates the rest itself."""
    stream_interval: int = Field(default=64, gt=0)
    """How many tokens vLLM puts into one event of an answer (from vLLM 0.32 on; before, `--stream-interval` does). An
    answer that is cut off may lose as many, where the server has no route that aborts requests. At most 8 for a harness
    that reads along."""
    session_header: str = "X-Session-ID"
    """The header with the session's id, by which a router before vLLM may keep a session's calls together."""
    data_parallel_size: int = Field(default=1, gt=0)
    """How many ranks a server has (`--data-parallel-size`). Each session stays with one rank."""
    record: list[ReplayRecord] = Field(default_factory=list)
    """What each answer must hold beside ids and logprobs, for trainers that replay it: `routed_experts` (vLLM with
    `--enable-return-routed-experts`), `sampling_mask` (`--return-sampling-mask`). The path is then `generate`."""
    tokenizer: str | None = None
    """With `required_prefix_token_ids`: the tokenizer that turns ids into text. A directory, a `tokenizer.json` or a
    model on the Hugging Face Hub; default: `model`."""

    @model_validator(mode="after")
    def _generate_records(self) -> Self:
        if self.record and (self.path == "chat" or self.prefix_field == "required_prefix_token_ids"):
            field = "path=chat" if self.path == "chat" else f"prefix_field={self.prefix_field}"
            raise ValueError(
                f"engine.record={self.record}: vLLM's streamed chat tells no such records; drop engine.{field}, and "
                "start vLLM with --enable-scale-out"
            )
        return self


class VllmEngine:
    """One server."""

    Options = VllmOptions

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self.http = Http("vLLM", str(options.url), options.api_key, options.patience_seconds)
        self.url = self.http.url
        self.model = options.model or ""
        self.max_model_len = options.max_model_len or 0
        self.takes_prefix_only = options.prefix_field == "required_prefix_token_ids"
        self.logprobs_mode: Literal["processed", "raw"] | None = None
        self.own_grammar: OwnGrammar | None = None
        self.path: Literal["chat", "generate", "plain"] = "plain"
        self._weight_version: str | None = None
        self._cache_salt = uuid.uuid4().hex
        """Keeps calls from keys and values that the prefix caches hold of other weights. It is random, because trainers
        and gateways that start again use the names of versions again. It stays where the caches were emptied: calls in
        flight at the update have computed theirs anew, and a new salt would hide these from the next calls."""
        self._abort: str | None = None
        """The server's route that aborts requests."""
        self._base: str | None = None
        self._model_root: str | None = None
        self._warned = False
        self._warned_of_reading = False
        self._tokenizer: Tokenizer | None = None

    async def start(self) -> None:
        """See `polar_gym.engines.replicas.Server`."""
        self.http.open()
        if self.takes_prefix_only:
            await self._start_with_nemo_rl()
            return
        entry = await served_model(self.http, self._options.model)
        self.model, self._base = entry["id"], entry.get("parent")
        self._model_root = (await served_model(self.http, self._base) if self._base else entry).get("root")
        self.max_model_len = context_length(self.http, entry, self._options.max_model_len)
        await self._probe()

    async def _start_with_nemo_rl(self) -> None:
        if not self.model:
            raise EngineError(400, f"engine.model: {self.url} does not list what it serves; name the policy's model")
        templated = await self.http.post("/tokenize", {"model": self.model, "messages": PROBE})
        self.max_model_len = context_length(self.http, {"id": self.model, **templated}, self._options.max_model_len)
        name = self._model_root = self._options.tokenizer or self.model
        self._tokenizer = await asyncio.to_thread(local_tokenizer, "engine.tokenizer", name)  # it has no /detokenize
        warn_of_unknown_grammar(self.url, "NeMo RL's server has no route for that")
        self.path = "chat"  # the echo of the first continuation shows whether the field is honoured

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="vllm",
            model=self.model,
            max_model_len=self.max_model_len,
            tokenizer=self._model_root,
            logprobs_mode=self.logprobs_mode,
            own_grammar=self.own_grammar,
            path=self.path,
            stream_interval=self._options.stream_interval,
            base_model=self._base,
            records=self._options.record,
        )

    @property
    def weight_version(self) -> str | None:
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: str | None) -> None:
        if version != self._weight_version:
            self._weight_version, self._cache_salt = version, uuid.uuid4().hex

    async def close(self) -> None:
        await self.http.close()

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self._warn_of_logprobs(sampling)
        complete = partial(self._complete, request, on_delta)
        return await within_the_space(complete, sampling_fields(sampling, request))

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        body: Body = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        if tools:
            body["tools"] = list(tools)
        if self._options.chat_template_kwargs:
            body["chat_template_kwargs"] = self._options.chat_template_kwargs
        return as_ids((await self.http.post("/tokenize", body))["tokens"])

    async def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is not None:
            return await asyncio.to_thread(self._tokenizer.decode, list(ids), skip_special_tokens=False)
        return (await self.http.post("/detokenize", {"model": self.model, "tokens": list(ids)}))["prompt"]

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        fitting = ids[: self.max_model_len - 1]
        sampling = Sampling().model_dump(exclude_none=True)
        body = {"model": self.model, "prompt": fitting.tolist(), "max_tokens": 1, "prompt_logprobs": 0, **sampling}
        answer = await self.http.post("/v1/completions", body, long=True)
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(fitting[1:].tolist(), entries[1:], strict=True)
        return np.asarray([np.nan, *(entry[str(token)]["logprob"] for token, entry in pairs)], np.float32)

    async def _complete(self, request: ChatRequest, on_delta: OnDelta | None, fields: dict[str, Any]) -> Completion:
        by_ids = self.path == "generate" and not any(map(has_media, request.messages))
        records = self._options.record if by_ids else []
        sent = None if request.prompt_ids is None else Sent(request.prompt_ids)
        answer = StreamedAnswer(self.http, on_delta or (lambda _: None), sent, records)
        headers = self._affinity(request)
        try:
            if by_ids:
                body = self._chat_body(request, fields)
                await answer_by_ids(
                    self.http,
                    body,
                    self.max_model_len,
                    answer,
                    self._abort,
                    headers=headers,
                    now=self._salt,
                    routed_positions=request.routed_positions,
                )
                return answer.completion(fields)
            body = self._chat_body(request, fields) | self._prompt_field(sent, request.prefix_length)
            await ask(self.http, CHAT, body, answer, self._abort, headers, self._salt)
        except EngineError as error:
            if not leaves_no_space(error, fields):
                raise
            raise no_space(self.max_model_len) from error
        completion = answer.completion(fields)
        if request.stream or self.own_grammar is None:
            return completion
        uncertain = uncertain_call(completion)
        if not (uncertain or lacks_call(completion, request.tools)):
            return completion
        try:
            return await read_again(self.http, body, answer, completion, "refused" if uncertain else "never")
        except EngineError as error:  # some of vLLM's parsers break at what the policy wrote
            self._warn_of_reading(error)
            return completion

    def _affinity(self, request: ChatRequest) -> dict[str, str]:
        """Return the headers by which routers, and vLLM's ranks, keep a session's calls together."""
        if request.session_id is None:
            return {}
        headers = {self._options.session_header: request.session_id}
        if self._options.data_parallel_size > 1:
            rank = zlib.crc32(request.session_id.encode()) % self._options.data_parallel_size
            headers["X-data-parallel-rank"] = str(rank)
        return headers

    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> Body:
        body = chat_body(self.model, request, fields, self._options.chat_template_kwargs)
        interval = self._options.stream_interval
        body["stream_interval"] = min(interval, READ_ALONG_INTERVAL) if request.stream else interval
        body["return_weight_versions"] = True  # from vLLM 0.33 on
        return body

    def _salt(self) -> Body:
        """Return the salt of now: a call that waits for a busy server may be sent after an update."""
        return {"cache_salt": self._cache_salt}

    def _prompt_field(self, sent: Sent | None, prefix_length: int) -> Body:
        if sent is None:
            return {}
        if self.takes_prefix_only:
            return {"required_prefix_token_ids": sent.ids[:prefix_length]}
        return {"kv_transfer_params": {"prompt_token_ids": sent.field}}

    async def set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        """See `polar_gym.engines.Updating`."""
        if not isinstance(weights, Path):
            raise EngineError(400, "engine=vllm reads weights from a directory: save the model, and give the path")
        async with paused(self.http):
            loaded, emptied = after_failure(version), False
            try:
                emptied = await reload(self.http, weights, version)
                loaded = version
            finally:  # the calls that go on must not have the name of the old weights
                self._weight_version = loaded
                if not emptied:
                    self._cache_salt = uuid.uuid4().hex

    def _warn_of_logprobs(self, sampling: Sampling) -> None:
        problem = logprobs_problem(self.logprobs_mode, sampling)
        if problem and not self._warned:
            self._warned = True
            log.warning("%s: %s; start vLLM with --logprobs-mode processed_logprobs", self.url, problem)

    def _warn_of_reading(self, error: EngineError) -> None:
        if not self._warned_of_reading:
            self._warned_of_reading = True
            told = "%s could not read an answer again, which stays as it was streamed: %s"
            log.warning(told, self.url, error.message)

    # What the server can do ---------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Find out how logprobs are taken, which path takes ids, and whether the server has a grammar of its own.
        Raises `EngineError` when ids are missing."""
        gap, templated = await self._probe_once(1.0)
        self.logprobs_mode = await self._measure_logprobs_mode(gap)
        self.path = await self._choose_path(np.concatenate([templated, templated]))
        self._abort = await abort_route(self.http)
        await self._ask_for_own_grammar()

    async def _ask_for_own_grammar(self) -> None:
        try:
            self.own_grammar = await own_grammar(self.http, self.model)
        except EngineError as error:
            if error.status == 503:  # the server is away
                raise
            warn_of_unknown_grammar(self.url, f"{error.status}: {error.message}")
        else:
            warn_of_own_grammar(self.url, self.own_grammar)

    async def _measure_logprobs_mode(self, gap: float) -> Literal["processed", "raw"] | None:
        """Return how logprobs are taken, from the gap at half the temperature: half the temperature doubles the gaps
        between processed logprobs and does not change raw ones."""
        at_half, _ = await self._probe_once(0.5)
        if not gap:
            return None
        if at_half <= 1.5 * gap:
            return "raw"
        await self._probe_once(0.5, top_k=PROBE_TOP_K)  # logits grow with temperature too, and may all be below zero
        return "processed"

    async def _choose_path(self, ids: NDArray[np.int32]) -> Literal["chat", "generate", "plain"]:
        """Return the path for calls. `ids` is a prompt that no template makes of any messages."""
        wanted = "generate" if self._options.record else self._options.path
        if wanted != "generate":
            _, echoed = await self._probe_once(1.0, ids)
            if np.array_equal(echoed, ids):
                return "chat"
        problem = "engine.path=chat" if wanted == "chat" else await self._why_not_generate(ids)
        if problem is None:
            return "generate"
        if wanted == "generate":
            field = f"record={self._options.record}" if self._options.record else "path=generate"
            raise EngineError(
                400, f"engine.{field}: {self.url} cannot do it ({problem}); start vLLM with --enable-scale-out"
            )
        log.warning(
            "%s: chat ignores kv_transfer_params.prompt_token_ids, and /inference/v1/generate is not used (%s): no "
            "prompt is spliced, traces may fork",
            self.url,
            problem,
        )
        return "plain"

    async def _why_not_generate(self, ids: NDArray[np.int32]) -> str | None:
        body = self._probe_body(1.0, None)
        async with self.http.within(SMALL_SECONDS):
            return await unusable(self.http, body, ids, self.max_model_len, self._options.record)

    def _probe_body(self, temperature: float, ids: NDArray[np.int32] | None, top_k: int = -1) -> Body:
        request = ChatRequest(model=self.model, messages=PROBE, max_tokens=1)
        fields = sampling_fields(Sampling(temperature=temperature, top_k=top_k), request)
        prompt = self._prompt_field(None if ids is None else Sent(ids), 0)
        return self._chat_body(request, fields) | prompt | {"top_logprobs": PROBE_TOP_LOGPROBS}

    async def _probe_once(
        self, temperature: float, ids: NDArray[np.int32] | None = None, top_k: int = -1
    ) -> tuple[float, NDArray[np.int32]]:
        """Return the gap between the likeliest next tokens of a fixed prompt, and that prompt as the engine saw it."""
        answer = await self.http.post(CHAT, self._probe_body(temperature, ids, top_k))
        prompt = prompt_ids(self.url, answer)
        ids_and_logprobs(self.url, answer["choices"][0])
        top = answer["choices"][0]["logprobs"]["content"][0].get("top_logprobs") or []
        check_normalised(self.url, [entry["logprob"] for entry in top], kept=top_k > 0)
        # The sampled token takes the last place in the list when it is not among the likeliest itself.
        likeliest = sorted((entry["logprob"] for entry in top), reverse=True)[: PROBE_TOP_LOGPROBS - 1]
        return (likeliest[0] - likeliest[-1] if likeliest else 0.0), prompt


class VllmReplicas(Replicas):
    """The servers that `engine.url` names."""

    Options = VllmOptions
    make = VllmEngine


ENGINE = VllmReplicas
