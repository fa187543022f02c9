"""Makes the start model: a small model that has imitated a careless agent.

The scripted policy plays attempts at tasks for training through the real harness, and `polar-gym export sft` makes rows
of them. Tokenizer and model are made here, and trained on the rows in three stages:

1. lists of names, each twice: the second unit of a name must be recalled. An induction head forms.
2. whole rows, and lists.
3. the same, but only the careless agent's own choices count: so that the model is right as often as that agent.

Of a row, names and the word after each count more than other words, and as much in a command that few rows have as in
others. Otherwise the model learns last which of several names a command needs, and where a name ends: a policy that
always decides right still fails at that.

In every batch the names of a row are replaced by other names for training: names that are held out are in none.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.durable import replacing
from polar_gym.errors import ConfigError
from polar_gym.learning import families, model
from polar_gym.learning.families import UNITS, names
from polar_gym.learning.model import Size, make_model, make_tokenizer

TIME = r"\b[0-9]+\.[0-9]+(?= seconds\b)"
NOISE = re.compile(
    rf"(?<=Chunk ID: )[0-9a-f]{{6}}\b|\b(?=[0-9a-f]*[0-9])[0-9a-f]{{6,40}}\b|\b20\d\d-\d\d-\d\d\b|{TIME}"
)
"""Parts of a prompt that differ between sessions for no reason: the ids that codex gives to tool results, and the times
that commands took; the base commit's id in claude_code's prompt; and the date. A model must not know a row by its ids,
a run may last beyond midnight, and commands take longer on a busy machine than on an idle one."""
OTHER_TIMES = 0.5
"""The share of the times that are not the usual one, in a variant with other times."""
DAYS = (date(2020, 1, 1).toordinal(), date(2040, 1, 1).toordinal())
VARIANTS = 12
"""How often each row is tokenised, with other noise. In every second variant, all commands took the usual time."""
BATCH = 24
LISTS = 48
SHORT, LONG = 4, 12
"""Names in a list."""
LIST_STEPS = 2000
RECALLED = 0.95
"""The probability of a name from which on a model counts as one that recalls names."""
KEPT_STEPS = 50
"""The steps after which the state of the training is written."""
NAME_WEIGHT = 2.0
"""The weight of the mean loss of names and of the words after them, beside the mean loss of all tokens. Each place of a
name has the same part in it, however few rows have that place."""
RARE = 5
"""A place of a name counts as known only where so many examples of it are looked at."""
CONFIRMING = 8
"""Batches that a model must also recall the names of, before it counts as one that does."""

Labelled = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids, and which of them are learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row as token ids."""

    ids: NDArray[np.int64]
    answers: list[tuple[int, int]]
    """The first and the last place of each of the agent's answers, the last one exclusive."""
    lead: int
    """The number of answers, from the first one on, that are not imitated in the last stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the training on rows, at a falling rate."""

    name: str
    steps: int
    rate: float
    until: float | None = None
    """At one rate instead, until names are recalled with this probability."""
    choices_only: bool = False
    """Train on no words of a row but the careless agent's own choices."""
    every: int = 1
    """Train on one in so many of a row's variants: with 2, on those with the usual times."""


STAGES = (
    Stage("whole conversations", 1000, 2e-3, until=RECALLED, every=2),
    Stage("whole conversations, slower", 300, 2e-3),
    Stage("imitation", 150, 1e-3, choices_only=True),
)


class ColdStart:
    """Trains a new model on the rows of a data set. The same seed gives the same model, however often it is resumed."""

    def __init__(
        self, rows: Sequence[dict[str, Any]], seed: int, size: Size, kept: Path, progress: Callable[[str], None]
    ) -> None:
        """Make tokenizer and model. `trained` of a row: which messages are answers of the agent, because some harnesses
        write one themselves. `lead`: how many of the first answers are not imitated. `kept`: the file by which an
        interrupted training of the same rows and seed goes on."""
        self._torch: Any = importlib.import_module("torch")
        self._chance = random.Random(seed)
        self._progress = progress
        rows = [{**row, "messages": _said(row["messages"])} for row in rows]
        usual = usual_time(rows)

        def variant(number: int, place: int) -> dict[str, Any]:
            return noisy(rows[place], random.Random(f"{seed} {place} {number}"), usual, other_times=number % 2 == 1)

        places = range(len(rows))
        self.tokenizer = make_tokenizer([variant(VARIANTS, place) for place in places])
        self.model = make_model(self.tokenizer, seed, size)
        self._scale = size.scale
        self._units = np.array(self.tokenizer.convert_tokens_to_ids(UNITS))
        self._is_unit = np.zeros(len(self.tokenizer), bool)
        self._is_unit[self._units] = True
        self.examples = [[self._example(variant(number, place)) for number in range(VARIANTS)] for place in places]
        self._optimizer = self._torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.9, 0.98))
        self._kept = kept
        self._program = program()
        self._done = (0, 0)
        """The stages that have ended, the lists being the first, and the steps of the next one."""
        self._length = SHORT
        """Names in a list of the first stage."""

    def train(self) -> None:
        """Train to the end, from where an interrupted training got to."""
        if self._kept.exists():
            self._restore()
        for number in range(self._done[0], 1 + len(STAGES)):
            if number == 0:
                self._learn_lists()
            else:
                self._learn_rows(STAGES[number - 1])
            self._done = (number + 1, 0)

    def _steps(self, count: int) -> Iterator[int]:
        """Yield the numbers, from 1, of the steps of a stage that are not done, and keep the state after some."""
        stage, done = self._done
        for step in range(done + 1, count + 1):
            yield step
            self._done = (stage, step)
            if step % KEPT_STEPS == 0:
                self._keep()

    def _keep(self) -> None:
        state = {
            "program": self._program,
            "done": self._done,
            "length": self._length,
            "chance": self._chance.getstate(),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._kept) as file:
            self._torch.save(state, file)

    def _restore(self) -> None:
        state = self._torch.load(self._kept, map_location=self.model.device, weights_only=True)
        if state.get("program") != self._program:
            self._progress("another polar-gym began the start model's training: it begins again")
            return
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._chance.setstate(state["chance"])
        self._done, self._length = state["done"], state["length"]
        self._progress("goes on with the start model's training")

    def _learn_lists(self) -> None:
        """Train on lists alone until their names are recalled: short ones teach, long ones make sure. Raises
        `ConfigError` where that fails."""
        for step in self._steps(LIST_STEPS):
            loss = self._loss(*self._batch([self._list(self._length) for _ in range(LISTS)]))
            self._take_step(loss, 2e-3 * min(1, step / 20))
            recalled = float((-loss.detach()).exp())
            if step % 50 == 0:
                self._progress(f"lists of {self._length}: step {step}, recalls {recalled:.3f}")
            if recalled > RECALLED and self._length == LONG:
                return
            self._length = LONG if recalled > 0.7 else self._length
        raise ConfigError(f"the start model did not learn to recall names in {LIST_STEPS} steps; choose another --seed")

    def _learn_rows(self, stage: Stage) -> None:
        """Train on rows and lists. Raises `ConfigError` where a stage does not get to its `until`."""
        for step in self._steps(stage.steps):
            batch = self._rows(stage, self._chance)
            loss = self._loss(*batch, NAME_WEIGHT)
            decay = 1 - 0.95 * step / stage.steps if stage.until is None else 1.0
            in_lists = self._loss(*self._batch([self._list(LONG) for _ in range(BATCH)]))
            self._take_step(loss + in_lists, stage.rate * min(1, step / 20) * decay)
            if step % 25 == 0:
                recalled = self._recalled([batch])
                self._progress(f"{stage.name}: step {step}, loss {float(loss.detach()):.3f}, recalls {recalled:.3f}")
                if stage.until is not None and recalled > stage.until and self._recalls(stage):
                    return
        if stage.until is not None:
            raise ConfigError(
                f"the start model did not learn to write names in {stage.steps} steps; choose another --seed"
            )

    def _recalls(self, stage: Stage) -> bool:
        """Return whether the model gets to a stage's `until` in many rows. One batch has too few of some names: of a
        last command that few of the careless agent's attempts come to."""
        chance = random.Random(0)
        recalled = self._recalled([self._rows(stage, chance) for _ in range(CONFIRMING)])
        self._progress(f"{stage.name}: recalls {recalled:.3f} in {CONFIRMING * BATCH} rows")
        return stage.until is not None and recalled > stage.until

    def _rows(self, stage: Stage, chance: random.Random) -> tuple[Any, Any]:
        """Return a batch of rows for a stage."""
        rows = chance.choices(self.examples, k=BATCH)
        examples = [chance.choice(row[:: stage.every]) for row in rows]
        return self._batch([self.labelled(example, stage.choices_only, chance) for example in examples])

    def _take_step(self, loss: Any, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate * self._scale
        self._optimizer.zero_grad()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def _example(self, row: dict[str, Any]) -> Example:
        ids = np.array(
            self.tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=True, return_dict=False)
        )
        begin, end = self.tokenizer.convert_tokens_to_ids(["<|im_start|>", self.tokenizer.eos_token])
        turns = [self._header(ids, int(start)) for start in np.flatnonzero(ids == begin)]
        written = [first for role, first in turns if role == "assistant"]
        said = zip(row["messages"], row["trained"], strict=True)
        own = [trained for message, trained in said if message["role"] == "assistant"]
        answers = [
            (first, first + int(np.argmax(ids[first:] == end)) + 1)
            for first, trained in zip(written, own, strict=True)
            if trained
        ]
        return Example(ids, answers, row["lead"])

    def _header(self, ids: NDArray[np.int64], start: int) -> tuple[str, int]:
        """Return the role of the turn that begins at `start`, and where its text begins."""
        for place in range(start + 1, len(ids)):
            header = self.tokenizer.decode(ids[start + 1 : place + 1])
            if header.endswith("\n"):
                return header.strip(), place + 1
        return "", len(ids)

    def labelled(self, example: Example, choices_only: bool, chance: random.Random) -> Labelled:
        """Return an example's ids with other names, and which of them are labels."""
        labels = np.zeros(len(example.ids), bool)
        for start, end in example.answers[example.lead if choices_only else 0 :]:
            labels[start:end] = True
        return self._renamed(example.ids, chance), labels

    def _renamed(self, ids: NDArray[np.int64], chance: random.Random) -> NDArray[np.int64]:
        """Replace each name by a random one for training. A name is two units, and no unit is in two names."""
        seconds = self._is_unit[ids] & np.append(False, self._is_unit[ids[:-1]])
        pairs = {int(ids[place - 1]): int(ids[place]) for place in np.flatnonzero(seconds)}
        mapping, fresh = np.arange(len(self.tokenizer)), names("train", chance)
        for pair in pairs.items():
            if mapping[pair[0]] == pair[0]:
                mapping[list(pair)] = self._as_ids(next(fresh))
        return mapping[ids]

    def _as_ids(self, name: str) -> list[int]:
        return [int(self._units[UNITS.index(unit)]) for unit in (name[:2], name[2:])]

    def _list(self, length: int) -> Labelled:
        """Return so many names, then the same in another order. Labels are the second units of the second time."""
        fresh = names("train", self._chance)
        first = [self._as_ids(next(fresh)) for _ in range(length)]
        (between,) = self.tokenizer("\n")["input_ids"]
        again = self._chance.sample(first, length)
        ids = np.array([token for name in first + again for token in (between, *name)])
        return ids, np.array([False, False, False] * length + [False, False, True] * length)

    def _batch(self, examples: Sequence[Labelled]) -> tuple[Any, Any]:
        longest = max(len(ids) for ids, _ in examples)
        ids = np.full((len(examples), longest), self.tokenizer.pad_token_id)
        labels = np.zeros((len(examples), longest), bool)
        for place, (own, own_labels) in enumerate(examples):
            ids[place, : len(own)], labels[place, : len(own)] = own, own_labels
        return self._tensor(ids), self._tensor(labels)

    def _tensor(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(array).to(self.model.device)

    def _loss(self, ids: Any, labels: Any, name_weight: float = 0.0) -> Any:
        hidden, chosen = self.model.model(input_ids=ids).last_hidden_state[:, :-1], labels[:, 1:]
        wanted, before = ids[:, 1:][chosen], ids[:, :-1][chosen]
        losses = self._torch.nn.functional.cross_entropy(self.model.lm_head(hidden[chosen]), wanted, reduction="none")
        if not name_weight:
            return losses.mean()
        is_unit = self._tensor(self._is_unit)
        of_names = is_unit[wanted] | is_unit[before]
        after_unit = -1 - is_unit[wanted].long()
        places = self._torch.where(is_unit[before], after_unit, before)[of_names]
        _, place, count = places.unique(return_inverse=True, return_counts=True)
        return losses.mean() + name_weight * (losses[of_names] / count[place]).sum() / max(1, len(count))

    def _recalled(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """Return how surely the model writes the names of its commands: the mean probability of a unit, at the place of
        a name where this is smallest. The token before tells places apart; all second units are one place."""
        places: defaultdict[int, list[float]] = defaultdict(list)
        for ids, labels in batches:
            with self._torch.no_grad():
                probabilities = self.model(input_ids=ids).logits[:, :-1].softmax(-1).cpu().numpy()
            tokens, wanted = ids.cpu().numpy(), labels.cpu().numpy()
            for row, place in np.argwhere(wanted[:, 1:] & self._is_unit[tokens[:, 1:]]):
                before, sure = int(tokens[row, place]), probabilities[row, place, tokens[row, place + 1]]
                places[-1 if self._is_unit[before] else before].append(sure)
        return min(float(np.mean(sure)) for sure in places.values() if len(sure) >= RARE)


@functools.cache
def program() -> str:
    """Return a digest of the program that makes a start model out of rows."""
    files = (Path(__file__), *(Path(str(module.__file__)) for module in (families, model)))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def usual_time(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the time that most commands took in the rows, as the harness writes it; empty where it writes none."""
    texts = [message["content"] for row in rows for message in row["messages"]]
    times = Counter(time for text in texts for time in re.findall(TIME, text))
    return max(times, key=lambda time: times[time], default="")


def noisy(row: Mapping[str, Any], chance: random.Random, usual: str, *, other_times: bool) -> dict[str, Any]:
    """Return a row with other noise. Each time becomes the usual one; with `other_times`, about half become random ones
    from a tenth of a millisecond to ten seconds, evenly by their logarithm."""

    def other(noise: re.Match[str]) -> str:
        if "-" in noise[0]:
            return str(date.fromordinal(chance.randrange(*DAYS)))
        if "." not in noise[0]:
            return "".join(chance.choices("0123456789abcdef", k=len(noise[0])))
        return f"{10 ** chance.uniform(-4, 1):.4f}" if other_times and chance.random() < OTHER_TIMES else usual

    return {**row, "messages": [{**each, "content": NOISE.sub(other, each["content"])} for each in row["messages"]]}


def _said(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message.get("content") or ""} for message in messages]
