"""One model call, as the gateway captured it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from polar_gym.record import Logprobs, Record, RoutedExperts, TokenIds

Message = dict[str, Any]
"""One chat message in OpenAI Chat Completions form; an assistant's thinking is in `reasoning`."""

ToolDefinition = dict[str, Any]
"""One tool in OpenAI Chat Completions form: `{"type": "function", "function": {...}}`."""

Kind = Literal["main", "subagent", "compaction", "auxiliary", "judge"]
"""The purpose of a call or a trace. `judge`: a program in the sandbox asked the model that is named `judge`."""


TIME_UP = "time"
"""The `error_kind` of a call that the end of the session's time cut off."""


class WeightVersion(Record):
    """Which weights sampled `response_ids[start:end]`."""

    version: str
    """The trainer's version: the one that was set when the call began, or by the call's end (`initial`: none was set).
    Where the trainer never set a version, the engine's own label."""
    engine_version: str | None = None
    """The engine's own label of its weights; None where the engine has no label."""
    start: int
    end: int
    estimated: bool = False
    """True where the engine did not confirm the version: it has no label, or a label that is not the trainer's."""
    until: str | None = None
    """Set for estimated spans whose weights changed during the call: the version at its end, or the engine's label
    where the trainer had not named that version yet. The token is unknown."""
    older_cache: bool = False
    """True for tokens that were sampled after an update in the middle of their call. The engine's cache then holds the
    tokens before them as earlier weights computed them, unless the updater had the engine compute them again."""


class Score(Record):
    """A second pass over the ids of a call, and how far the captured logprobs are from those of the pass."""

    by: str
    """`engine`, which sampled the call, or `reference`, the one of `scoring.reference`."""
    read: int = 0
    """Tokens that the pass was asked to read."""
    tokens: int = 0
    """Sampled tokens that were compared."""
    mean_abs: float = 0.0
    """The mean |captured - scored| in nats."""
    max_abs: float = 0.0
    problem: str | None = None
    """Why nothing was compared: `cancelled`, `weights_changed`, the class of an error, or how the call was sampled."""


class SamplingMask(Record):
    """The tokens that top-k, top-p and min-p left to be drawn, for each sampled token, as a CSR matrix without values.

    Token `i` was drawn from `token_ids[offsets[i]:offsets[i + 1]]`. An empty set: nothing was cut, or not recorded.
    """

    offsets: TokenIds
    """Shape (sampled tokens + 1,)."""
    token_ids: TokenIds
    """Shape (offsets[-1],)."""

    @model_validator(mode="after")
    def _offsets_fit(self) -> Self:
        ends = self.offsets
        if not len(ends) or ends[0] != 0 or ends[-1] != len(self.token_ids) or (np.diff(ends) < 0).any():
            raise ValueError(f"offsets do not divide the {len(self.token_ids)} token ids")
        return self

    @classmethod
    def of(cls, kept: Sequence[Sequence[int] | TokenIds]) -> SamplingMask:
        """Return the mask of a list of sets, one for each sampled token."""
        flat = np.concatenate([np.empty(0, np.int32), *(np.asarray(ids, np.int32) for ids in kept)])
        return cls(offsets=np.cumsum([0, *map(len, kept)], dtype=np.int32), token_ids=flat)

    def after(self, tokens: int) -> SamplingMask:
        """Return the mask of a longer sequence, which begins with `tokens` that have empty sets."""
        return SamplingMask(
            offsets=np.concatenate([np.zeros(tokens, np.int32), self.offsets]), token_ids=self.token_ids
        )

    def first(self, tokens: int) -> SamplingMask:
        """Return the mask of the first `tokens`."""
        offsets = self.offsets[: tokens + 1]
        return SamplingMask(offsets=offsets, token_ids=self.token_ids[: offsets[-1]])

    def sets(self) -> list[TokenIds]:
        """Return the set of each sampled token."""
        return np.split(self.token_ids, self.offsets[1:-1]) if len(self.offsets) > 1 else []


ToolStatus = Literal["ok", "malformed", "unknown_tool", "schema_violation"]


class ToolAttempt(Record):
    """One attempt of the policy to call a tool, and what the engine's parser made of the attempt."""

    call_id: str
    """The model call in whose answer the attempt is."""
    status: ToolStatus
    """`malformed`: the parser found no call, or arguments that are not a JSON object. `unknown_tool`: the request
    offers no tool of that name. `schema_violation`: the tool's schema refuses the arguments."""
    name: str | None = None
    """The tool's name; None where the parser found no call."""
    span: tuple[int, int] | None = None
    """The attempt, with its markers, is `response_ids[span[0]:span[1]]`. None: the tokens are not known."""


class ToolDifference(Record):
    """A tool result that differs from the one in the record from which a call was answered."""

    message: int
    """Index of the result in `ModelCall.messages`."""
    characters: int
    """How many characters lie between the common beginning and the common end, in the longer of the two results."""
    only_volatile: bool
    """True where times, dates, durations, process ids, hashes and temporary paths are all that differs."""


class Replayed(Record):
    """How a call was answered from the record of another session."""

    session_id: str
    """The session that sampled the call's tokens."""
    owned: bool
    """True: that session is this one, in an earlier attempt, and trains the tokens here. False: the tokens are context
    (the session was branched)."""
    differences: list[ToolDifference] = Field(default_factory=list)
    """Of the tool results after the last answer in the request."""
    volatile: dict[str, int] = Field(default_factory=dict)
    """How often each volatile field of the harness stood for different text, by the field's name. With the handles that
    are others than in the record, by their name, and under `notice` how many notices came with another request."""
    seconds: float = 0.0
    """How long the gateway took to find the answer in the record."""


class ModelCall(Record):
    """One request of a harness through the proxy, with its answer.

    Invariant: `len(response_ids) == len(logprobs)`; with splicing, `prompt_ids + response_ids` is the exact prefix of
    its child's `prompt_ids`.
    """

    call_id: str
    session_id: str
    index: int = Field(ge=0)
    """Order of arrival within the session."""
    provider: str
    model: str
    messages: list[Message]
    tools: list[ToolDefinition] = Field(default_factory=list)
    response: Message | None = None
    """The assistant message as the engine parsed it; None when no answer was received."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Every sampling field as it was sent to the engine."""
    sampling_mismatch: list[str] = Field(default_factory=list)
    """Causes that changed the policy's distribution: fields of the harness (a forced tool, a grammar), or the engine's
    `own_grammar`."""
    single_tool_call: bool = False
    """True where the harness offered tools and asked for at most one tool call. The engine was not told, because it
    would force the answer into a grammar. The policy may therefore have called several tools."""
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str | None = None
    stop_sequence: str | None = None
    """The harness's stop sequence that ended the answer, if one did."""
    parent_id: str | None = None
    """The call whose history and answer this call's request extends, by its messages."""
    continuation: Literal["root", "spliced", "canonical"] = "root"
    """`spliced`: the parent's ids plus the new ones, sent pre-tokenised. `canonical`: templated by the engine although
    the call has a parent. `root`: no parent."""
    splice_cause: str | None = None
    """The reason why a continuation was not spliced, or why a request that names known calls continues none of them."""
    weight_versions: list[WeightVersion] = Field(default_factory=list)
    outcome: Literal["delivered", "abandoned", "failed"] = "delivered"
    """`abandoned`: the harness closed the connection, or its time ended, before the answer was complete. `failed`: the
    engine gave none."""
    hints: dict[str, str] = Field(default_factory=dict)
    """The hints that the harness's `classify` read: `kind` (subagent, compaction, auxiliary) and `thread`."""
    started_at: float
    """Unix time, seconds."""
    duration: float
    """Seconds from the request's arrival to the engine's complete answer."""
    agent_seconds: float | None = None
    """How much of its time the agent had used at the end of the call, in all attempts of the session and without pauses
    of generation. None in files of earlier versions."""
    error: str | None = None
    error_kind: str | None = None
    """`context_length`: the conversation became too long for the model, through the policy. `unreachable`: the engine
    could not be connected to. `time`: the session's time ended. Any other kind may be the machinery's doing, or that of
    a request of the agent."""
    engine_tokens: int | None = None
    """How many tokens the engine counts for the answer: those beyond `response_ids` were never sent. None where the
    engine gave no count."""
    cached_tokens: int | None = None
    """How many of `prompt_ids` the engine had in its prefix cache. None where the engine does not tell (vLLM tells with
    `--enable-prompt-tokens-details`), and for answers of another session."""
    engine_url: str | None = None
    """The server that answered, where `engine.url` names several."""
    edited_answers: dict[str, list[str]] = Field(default_factory=dict)
    """Earlier answers that the request states in other words than the policy's, by call -> the parts that differ
    (`text`, `reasoning`, `tool_calls`). A spliced prompt holds the policy's own tokens all the same."""
    frozen: str | None = None
    """The model that answered in place of the policy (`proxy.frozen`); None: the policy did."""
    scores: list[Score] = Field(default_factory=list)
    """The second passes over the call, where it was scored while its session ran."""
    routed_experts: RoutedExperts | None = None
    """The experts of the positions up to the last one that was run: all but the last sampled token, whose row would be
    the next. A spliced call has the rows that its parent's record does not have. None: not recorded."""
    sampling_mask: SamplingMask | None = None
    """One set for each sampled token. None: not recorded, or nothing was cut."""

    replayed: Replayed | None = None
    """Set where the call was answered from a record, without the engine. Ids, logprobs, versions and messages are then
    those of the record."""

    @property
    def kind(self) -> Any:
        """Return the kind of the call, as the harness's `classify` named it."""
        return self.hints.get("kind", "main")

    @property
    def branched_from(self) -> str | None:
        """Return the session that sampled and trains the call's tokens; None: the call's own session does."""
        return None if self.replayed is None or self.replayed.owned else self.replayed.session_id

    @model_validator(mode="after")
    def _one_set_per_token(self) -> Self:
        if self.sampling_mask is not None and len(self.sampling_mask.offsets) != len(self.response_ids) + 1:
            raise ValueError(
                f"call {self.call_id}: {len(self.response_ids)} sampled ids but "
                f"{len(self.sampling_mask.offsets) - 1} sets in its sampling mask"
            )
        return self

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(
                f"call {self.call_id}: {len(self.response_ids)} sampled ids but {len(self.logprobs)} logprobs"
            )
        return self

    def differences(self, scored: Logprobs) -> Logprobs:
        """Return |captured - scored| of the sampled tokens. `scored`: the logprobs of ids that begin with prompt and
        answer of the call. Tokens beyond the end of `scored` are left out."""
        again = scored[len(self.prompt_ids) : len(self.prompt_ids) + len(self.response_ids)]
        return abs(again - self.logprobs[: len(again)])
