"""SGLang behind a URL, asked for ids with `return_token_ids`, its spliced prompts sent as `input_ids`.

Written from SGLang's sources and tested against a stand-in only: no real server has been tried. Ask a worker, not
sglang-router, which drops the ids. Logprobs are taken after temperature. Whether top-p and top-k are applied before is
not known, so that `logprobs_mode` is None: sample without them. SGLang refuses ids in streams, so an answer comes as
one piece.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines import EngineError
from polar_gym.engines.context_length import within_the_space
from polar_gym.engines.http import Body, Http
from polar_gym.engines.openai_form import (
    CHAT,
    ServerOptions,
    as_ids,
    chat_body,
    check_whole,
    context_length,
    logprobs_of,
    message_of,
    served_model,
    stop_sequence,
)
from polar_gym.engines.replicas import Replicas
from polar_gym.engines.sampling import sampling_fields
from polar_gym.engines.vllm.own_grammar import warn_of_unknown_grammar
from polar_gym.schema import EngineInfo, Message, Sampling, ToolDefinition


class SglangEngine:
    """One server."""

    Options = ServerOptions
    takes_prefix_only = False

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.http = Http("SGLang", str(options.url), options.api_key, options.patience_seconds)
        self.model = options.model or ""
        self.max_model_len = options.max_model_len or 0
        self.weight_version: str | None = None
        self._model_root: str | None = None

    async def start(self) -> None:
        """See `polar_gym.engines.replicas.Server`."""
        self.http.open()
        entry = await served_model(self.http, self._options.model)
        self.model, self._model_root = entry["id"], entry.get("root")
        self.max_model_len = context_length(self.http, entry, self._options.max_model_len)
        await self.template([{"role": "user", "content": "ping"}], [])
        warn_of_unknown_grammar(self.http.url, "SGLang has no route for that")

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="sglang",
            model=self.model,
            max_model_len=self.max_model_len,
            tokenizer=self._model_root,
            path="chat",
        )

    async def close(self) -> None:
        await self.http.close()

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        complete = partial(self._complete, self.http.sample, request)
        return await within_the_space(complete, sampling_fields(sampling, request))

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        """Return the prompt ids that SGLang names with an answer of one token: its tokenising route takes text only."""
        request = ChatRequest(model=self.model, messages=list(messages), tools=list(tools), max_tokens=1)
        return (await self._complete(self.http.post, request, sampling_fields(Sampling(), request))).prompt_ids

    async def decode(self, ids: Sequence[int]) -> str:
        body = {"model": self.model, "tokens": list(ids), "skip_special_tokens": False}
        return (await self.http.post("/detokenize", body))["text"]

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        fitting = ids[: self.max_model_len - 1]
        asked = {"input_ids": fitting.tolist(), "return_logprob": True, "logprob_start_len": 0}
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        answer = await self.http.post("/generate", {**asked, "sampling_params": sampling}, long=True)
        entries = answer["meta_info"]["input_token_logprobs"]
        return np.asarray([np.nan, *(logprob for logprob, *_ in entries[1:])], np.float32)

    async def _complete(
        self, post: Callable[[str, Body], Awaitable[Body]], request: ChatRequest, fields: dict[str, Any]
    ) -> Completion:
        body = chat_body(self.model, request, fields, self._options.chat_template_kwargs)
        # SGLang reads reasoning under this name alone, and leaves out the other without an error.
        body["messages"] = [
            {**message, "reasoning_content": message["reasoning"]} if message.get("reasoning") else message
            for message in request.messages
        ]
        if request.prompt_ids is not None:
            body["input_ids"] = request.prompt_ids
        answer = await post(CHAT, body)
        choice = answer["choices"][0]
        prompt_ids, response_ids = self._ids(choice)
        counted = (answer.get("usage") or {}).get("completion_tokens")
        check_whole(self.http.url, counted, response_ids)
        return Completion(
            message=message_of(choice["message"]),
            finish_reason=choice["finish_reason"],
            stop_sequence=stop_sequence(choice),
            prompt_ids=as_ids(prompt_ids),
            response_ids=as_ids(response_ids),
            logprobs=np.asarray(logprobs_of(self.http.url, choice, response_ids), np.float32),
            sampling=fields,
            engine_tokens=counted,
        )

    def _ids(self, choice: Body) -> tuple[list[int], list[int]]:
        prompt_ids, response_ids = choice.get("prompt_token_ids"), choice.get("response_token_ids")
        if prompt_ids is None or response_ids is None:
            raise EngineError(
                502,
                f"SGLang at {self.http.url} answered without token ids: it does not know `return_token_ids`, or a "
                "router in between drops them; use a newer version, and the URL of a worker",
            )
        return prompt_ids, response_ids


class SglangReplicas(Replicas):
    """The servers that `engine.url` names."""

    Options = ServerOptions
    make = SglangEngine


ENGINE = SglangReplicas
