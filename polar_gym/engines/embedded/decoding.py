"""Sampling of several answers at once: a step adds one token to each.

One thread does all the work, in turns: a turn begins the answers that wait, as far as there are slots, and takes one
step. Other work of the thread, such as a second pass or new weights, comes between two turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polar_gym.chat import ChatRequest
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.experts import Routers
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE, Generation
from polar_gym.engines.embedded.slots import caches
from polar_gym.engines.weights import INITIAL
from polar_gym.record import RoutedExperts, TokenIds
from polar_gym.schema import Sampling

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM."""


@dataclass(eq=False, slots=True, kw_only=True)
class Answer:
    """An answer that waits or is being sampled."""

    request: ChatRequest
    """`prompt_ids` and `max_tokens` are set."""
    sampling: Sampling
    ends: Callable[[list[int]], bool]
    """Says of the ids so far whether the last one completes the answer."""
    tell: Callable[[list[int], list[float]], object] | None
    keep: bool = False
    """The answer records the ids from which each id is drawn."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: Future[Generation] = field(default_factory=Future)
    generator: Any = None
    prompt: list[int] = field(default_factory=list)
    slot: int = 0
    known: int = 0
    """How many ids of the prompt were computed for an earlier answer."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    kept: list[TokenIds] = field(default_factory=list)
    versions: list[tuple[int, str]] = field(default_factory=list)
    """At which token the sampling began under which weights."""


class Decoder:
    """Samples the answers of one model."""

    def __init__(self, torch: Any, model: Any, worker: ThreadPoolExecutor, slots: int, routers: Routers | None) -> None:
        self.weights = INITIAL
        """The name of the weights."""
        self._torch, self._model, self._worker, self._routers = torch, model, worker, routers
        self._caches = caches(torch, model, slots)
        self._slots = slots
        self._waiting: deque[Answer] = deque()
        self._sampled: list[Answer] = []
        self._begun = False
        """A turn is planned."""
        self._lock = threading.Lock()

    def submit(self, answer: Answer) -> None:
        answer.done.set_running_or_notify_cancel()  # from now on only the worker's thread ends it
        with self._lock:
            self._waiting.append(answer)
            if not self._begun:
                self._plan()

    def set_weights(self, state: Mapping[str, Any], version: str) -> None:
        """Take new weights, in the worker's thread. Answers that are being sampled go on under them: the keys and
        values of their ids are computed again. Raises `EngineError` for the weights of another model."""
        old, new = ({(name, value.shape) for name, value in each.items()} for each in (self._model.state_dict(), state))
        if others := sorted(f"{name} {tuple(shape)}" for name, shape in old ^ new):
            raise EngineError(400, f"the weights are not this model's: they differ in {', '.join(others[:4])}")
        self._model.load_state_dict(state)
        self.weights = version
        self._caches.forget()
        with self._torch.inference_mode():
            for answer in list(self._sampled):
                with self._guarded(answer):
                    self._caches.again(answer.slot, [*answer.prompt, *answer.ids[:-1]])
                    answer.versions.append((len(answer.ids), version))

    def _turn(self) -> None:
        with self._torch.inference_mode():
            self._begin()
            self._step()
        with self._lock:
            self._plan()

    def _plan(self) -> None:
        """Plan the next turn, if there are answers. The caller has the lock."""
        self._begun = bool(self._waiting or self._sampled)
        if not self._begun:
            return
        try:
            self._worker.submit(self._turn)
        except RuntimeError:  # the worker was shut down
            for answer in (*self._waiting, *self._sampled):
                answer.done.set_exception(EngineError(503, "the engine was closed", kind="server"))
            self._waiting.clear()
            self._sampled.clear()
            self._begun = False

    @contextlib.contextmanager
    def _guarded(self, *answers: Answer) -> Iterator[None]:
        """Give an error in the context to the calls of these answers: the thread works for other calls, too."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            for answer in answers:
                self._leave(answer)
                answer.done.set_exception(error)

    def _begin(self) -> None:
        """Run the prompts of waiting answers, and draw the first token of each."""
        with self._lock:
            given_up = [each for each in (*self._waiting, *self._sampled) if each.cancelled.is_set()]
            self._waiting = deque(each for each in self._waiting if each not in given_up)
        for answer in given_up:
            self._finish(answer, "length")
        while self._waiting and len(self._sampled) < self._slots:
            answer = self._waiting.popleft()
            answer.versions.append((0, self.weights))
            with self._guarded(answer):
                self._prefill(answer)

    def _prefill(self, answer: Answer) -> None:
        request = answer.request
        assert request.prompt_ids is not None
        answer.prompt = request.prompt_ids.tolist()
        answer.generator = self._torch.Generator(self._model.device)
        if answer.sampling.seed is None:
            answer.generator.seed()
        else:
            answer.generator.manual_seed(answer.sampling.seed)
        rows: list[RoutedExperts] = []
        most = request.routed_positions if self._routers else len(answer.prompt)
        with self._routers.recorded(rows) if self._routers else contextlib.nullcontext():
            answer.slot, answer.known, logits = self._caches.begin(answer.prompt, most)
        answer.experts += rows
        self._sampled.append(answer)
        self._draw(answer, logits)

    def _step(self) -> None:
        """Add a token to each answer that is being sampled."""
        if not (answers := list(self._sampled)):
            return
        rows: list[RoutedExperts] = []
        with self._guarded(*answers):
            with self._routers.recorded(rows) if self._routers else contextlib.nullcontext():
                logits = self._caches.step([each.slot for each in answers], [each.ids[-1] for each in answers])
            for place, answer in enumerate(answers):
                answer.experts += [row[place : place + 1] for row in rows]
                with self._guarded(answer):
                    self._draw(answer, logits[place])

    def _draw(self, answer: Answer, logits: Any) -> None:
        torch, ids = self._torch, answer.ids
        distribution = log_distribution(torch, logits.float(), answer.sampling, answer.prompt, ids)
        token = int(torch.multinomial(distribution.exp(), 1, generator=answer.generator))
        ids.append(token)
        answer.logprobs.append(float(distribution[token]))
        if answer.keep:
            answer.kept.append(distribution.isfinite().nonzero()[:, 0].to(torch.int32).cpu().numpy())
        if answer.tell and len(ids) % TOKENS_AT_ONCE == 0:
            answer.tell(ids[-TOKENS_AT_ONCE:], answer.logprobs[-TOKENS_AT_ONCE:])
        if answer.ends(ids):
            self._finish(answer, "stop")
        elif len(ids) == answer.request.max_tokens:
            self._finish(answer, "length")

    def _finish(self, answer: Answer, reason: Any) -> None:
        self._leave(answer)
        experts = None
        if answer.experts:
            experts = np.concatenate(answer.experts)[answer.request.routed_positions - answer.known :]
        kept = answer.kept if answer.keep else None
        answer.done.set_result(Generation(answer.ids, answer.logprobs, reason, experts, kept, versions=answer.versions))

    def _leave(self, answer: Answer) -> None:
        if answer in self._sampled:
            self._sampled.remove(answer)
            self._caches.end(answer.slot)


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
