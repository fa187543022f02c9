"""A training run: start model, steps of GRPO, evaluation on held-out tasks. A stopped run goes on where it was.

The files of a run, in its directory:

    plan.json                  the arguments; a run goes on only with the same ones
    tasks/                     the tasks for training, and the held-out ones
    demonstrations.jsonl, sft/ the careless agent's episodes, and their rows
    start/                     the start model
    episodes/                  every episode, a file for each step and each evaluation
    steps.jsonl                a line for each step and each evaluation: rewards, tokens, CPU seconds, memory
    last.pt                    the weights and the optimizer after the last step
    curve.svg                  the reward on held-out tasks
"""

from __future__ import annotations

import importlib.util
import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym

from polar_gym import durable
from polar_gym.config.run_config import RunConfig
from polar_gym.engines.weights import INITIAL
from polar_gym.episodes.pass_at_k import wilson
from polar_gym.episodes.reading import read_episodes
from polar_gym.errors import ConfigError
from polar_gym.export.acceptance import Filters
from polar_gym.export.sft import export_sft
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.learning.cold_start import ColdStart
from polar_gym.learning.families import Split, demonstrate, make_puzzles, scripts, write_tasks
from polar_gym.learning.grpo import MakeRows, Settings, Trainer, choose, roll_out, rows_of
from polar_gym.learning.model import save
from polar_gym.learning.report import curve, sentence
from polar_gym.schema import Episode

Progress = Callable[[str], None]

OWN_HELD_OUT = 5
"""One of so many tasks of the user's is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments of a run."""

    family: str | None
    """None: the config's tasks, for a model that the config names."""
    seed: int = 0
    steps: int = 25
    evaluate_every: int = 5
    demonstrations: int = 128
    train_tasks: int = 200
    held_out: int = 32
    """Tasks of an evaluation on the way."""
    final: int = 200
    """Tasks of the first and of the last evaluation."""
    places: int = 16
    """Sessions at once."""
    overlap: bool = False
    """The sessions of a step begin before the update of the step before, and go on under its weights: one step
    off-policy. An evaluation waits for all sessions."""
    grpo: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class Tasks:
    """The source of all tasks, and the ids of its two parts."""

    source: dict[str, Any]
    train: list[str]
    held_out: list[str]


class Run:
    """One run in its directory."""

    def __init__(
        self, directory: Path, plan: Plan, config: RunConfig, progress: Progress, make_rows: MakeRows = rows_of
    ) -> None:
        """`make_rows` makes the rows of a step; a control of an experiment may spoil them. Raises `ConfigError` where
        the directory has a run of another plan, or where a package is missing."""
        self.directory, self.plan = directory, plan
        self._config, self._progress, self._make_rows = config, progress, make_rows
        self._clock: dict[str, float] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._check_plan()
        if missing := [name for name in ("torch", "transformers", "pyarrow") if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"{', '.join(missing)}: missing; install with: pip install 'polar-gym[torch,export]'")

    def _check_plan(self) -> None:
        config = self._config.model_dump(mode="json", exclude={"rollout"})
        told = json.dumps({"plan": asdict(self.plan), "config": config}, indent=1) + "\n"
        path = self.directory / "plan.json"
        if path.exists() and path.read_text(encoding="utf-8") != told:
            raise ConfigError(f"--out={self.directory}: a run with other arguments is there ({path}); choose another")
        durable.write(path, told.encode())

    def go(self) -> list[dict[str, Any]]:
        """Run, or go on, to the end. Return the lines of `steps.jsonl`."""
        start = self._start_model()
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype="auto")
        if importlib.import_module("torch").cuda.is_available():
            model.to("cuda")
        tokenizer = transformers.AutoTokenizer.from_pretrained(start)
        trainer = Trainer(model, self.plan.grpo, tokenizer.pad_token_id)
        tasks = self._tasks()
        done = self._restore(trainer)
        with self._environment(self._engine(policy="transformers", model_path=str(start)), tasks.source) as envs:
            if done:
                envs.set_weights(model.state_dict(), _version(done))
            self._train(envs, trainer, tasks, done)
        lines = self._written()
        durable.write(self.directory / "curve.svg", curve({self.directory.name: lines}).encode())
        return lines

    def _train(self, envs: Any, trainer: Trainer, tasks: Tasks, done: int) -> None:
        ahead: Future[list[Episode]] | None = None
        with ThreadPoolExecutor(1) as pool:
            for step in range(done, self.plan.steps + 1):
                self._evaluate_where_due(envs, tasks.held_out, step)
                if step == self.plan.steps:
                    return
                with self._measured("rollout"):
                    episodes = ahead.result() if ahead else self._sessions(envs, tasks.train, step)
                if self.plan.overlap and step + 1 < self.plan.steps and not self._is_due(step + 1):
                    ahead = pool.submit(self._sessions, envs, tasks.train, step + 1)
                else:
                    ahead = None
                self._step(envs, trainer, episodes, step)

    def _step(self, envs: Any, trainer: Trainer, episodes: Sequence[Episode], step: int) -> None:
        with self._measured("training"):
            batch = self._make_rows(episodes)
            figures = trainer.update(batch.rows, _version(step), step / self.plan.steps)
        envs.set_weights(trainer.model.state_dict(), _version(step + 1))
        self._write({"step": step + 1, **_told(episodes), **figures, "trained": batch.counts.tokens})
        self._save(trainer, step + 1)

    def _sessions(self, envs: Any, task_ids: Sequence[str], step: int) -> list[Episode]:
        return self._play(envs, choose(task_ids, self.plan.grpo, self.plan.seed, step), f"step-{step + 1:03}", {})

    def _is_due(self, step: int) -> bool:
        """Return whether the weights after a step are evaluated."""
        return step % self.plan.evaluate_every == 0 or step == self.plan.steps

    def _evaluate_where_due(self, envs: Any, task_ids: Sequence[str], step: int) -> None:
        if not self._is_due(step):
            return
        first, last = step == 0, step == self.plan.steps
        done = [(line["evaluated"], line["greedy"]) for line in self._written() if "evaluated" in line]
        for greedy in (True, False) if first else (False,):
            if (step, greedy) not in done:
                some = task_ids if first or last else task_ids[: self.plan.held_out]
                name = f"held-out-{step:03}{'-greedy' if greedy else ''}"
                with self._measured("rollout"):
                    episodes = self._play(envs, some, name, {"temperature": 0.0} if greedy else {})
                self._write({"evaluated": step, "greedy": greedy, **_told(episodes)})

    def _play(self, envs: Any, task_ids: Sequence[str], name: str, action: dict[str, Any]) -> list[Episode]:
        episodes = list(roll_out(envs, task_ids, action))
        path = self.directory / "episodes" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        durable.write(path, b"".join(episode.to_json() + b"\n" for episode in episodes))
        return episodes

    def _engine(self, **options: Any) -> dict[str, Any]:
        return {**self._config.engine.model_dump(mode="json"), "slots": self.plan.places, **options}

    @contextmanager
    def _environment(self, engine: dict[str, Any], tasks: dict[str, Any]) -> Iterator[Any]:
        settings = self._config.model_dump(mode="json", exclude={"engine", "tasks"})
        if settings["sampling"]["seed"] is None:
            settings["sampling"]["seed"] = self.plan.seed
        envs = gym.make_vec("polar/swe", num_envs=self.plan.places, engine=engine, tasks=tasks, **settings)
        try:
            yield envs
        finally:
            envs.close()

    def _tasks(self) -> Tasks:
        """Return the family's tasks; without a family, the config's, of which every fifth is held out."""
        if self.plan.family is None:
            ids = [task.instance_id for task in load_tasks(self._config)]
            held_out = ids[::OWN_HELD_OUT]
            train = [task_id for task_id in ids if task_id not in held_out]
            return Tasks(self._config.tasks.model_dump(mode="json"), train, held_out)
        train = self._write_tasks("train", self.plan.train_tasks)
        held_out = self._write_tasks("held_out", self.plan.final)
        both = self.directory / "tasks" / "all.jsonl"
        durable.write(both, train.read_bytes() + held_out.read_bytes())
        return Tasks({"name": "jsonl", "path": str(both)}, _ids(train), _ids(held_out))

    def _write_tasks(self, split: Split, count: int) -> Path:
        assert self.plan.family is not None
        return write_tasks(self.directory / "tasks", self.plan.family, split, self.plan.seed, count)

    def _start_model(self) -> Path:
        """Return the directory of the start model: the user's, or one that is made where it is missing."""
        if (given := self._config.engine.options.get("model_path")) is not None:
            return Path(given)
        target = self.directory / "start"
        if target.exists():
            return target
        leads = self._demonstrate()
        rows = self.directory / "sft"
        shutil.rmtree(rows, ignore_errors=True)
        filters = Filters(min_reward=0.0, allow_scripted=True)
        export_sft(read_episodes(self.directory / "demonstrations.jsonl"), rows, filters)
        found = [row for path in sorted((rows / "jsonl").glob("*.jsonl")) for row in _lines(path) if "messages" in row]
        with self._measured("cold start"):
            cold = ColdStart(found, leads, self.plan.seed, self._progress)
            cold.train()
        made = self.directory / "start.partial"
        save(cold.model, cold.tokenizer, made)
        made.rename(target)
        self._write({"cold_start": True})
        return target

    def _demonstrate(self) -> dict[str, int]:
        """Have the careless agent play tasks for training. Return the lead of each task's demonstration."""
        plan, played = self.plan, self.directory / "demonstrations.jsonl"
        assert plan.family is not None
        tasks = self._write_tasks("train", plan.demonstrations)
        ids = _ids(tasks)
        chance = random.Random(plan.seed)
        puzzles = make_puzzles(plan.family, "train", plan.seed, plan.demonstrations)
        pairs = [(puzzle, demonstrate(puzzle, chance)) for puzzle in puzzles]
        if not played.exists():
            engine = self._engine(policy="scripted", scripts=scripts(pairs))
            source = {"name": "jsonl", "path": str(tasks)}
            with self._environment(engine, source) as envs, self._measured("demonstrations"):
                episodes = list(roll_out(envs, ids, {}))
            durable.write(played, b"".join(episode.to_json() + b"\n" for episode in episodes))
        return {task_id: demonstration.lead for task_id, (_, demonstration) in zip(ids, pairs, strict=True)}

    def _save(self, trainer: Trainer, step: int) -> None:
        torch: Any = importlib.import_module("torch")
        path = self.directory / "last.pt"
        state = {"step": step, "model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        with durable.replacing(path) as file:
            torch.save(state, file)

    def _restore(self, trainer: Trainer) -> int:
        """Load the state after the last step, and return the number of steps that are done."""
        torch: Any = importlib.import_module("torch")
        path = self.directory / "last.pt"
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        lines = [line for line in self._written() if line.get("step", 0) <= state["step"]]  # a later one was not saved
        durable.write(self.directory / "steps.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    @contextmanager
    def _measured(self, part: str) -> Iterator[None]:
        begun, own, others = time.monotonic(), _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN)
        yield
        for name, seconds in (
            (f"{part}_seconds", time.monotonic() - begun),
            (f"{part}_cpu", _cpu(resource.RUSAGE_SELF) - own),
            (f"{part}_sandbox_cpu", _cpu(resource.RUSAGE_CHILDREN) - others),
        ):
            self._clock[name] = self._clock.get(name, 0.0) + seconds

    def _written(self) -> list[dict[str, Any]]:
        path = self.directory / "steps.jsonl"
        return list(_lines(path)) if path.exists() else []

    def _write(self, line: dict[str, Any]) -> None:
        line |= {name: round(value, 2) for name, value in self._clock.items()}
        line["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        self._clock.clear()
        with (self.directory / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._progress(sentence(line))


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _version(step: int) -> str:
    """Return the name of the weights after a step."""
    return f"step-{step}" if step else INITIAL


def _ids(tasks: Path) -> list[str]:
    return [row["instance_id"] for row in _lines(tasks)]


def _told(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the figures of some episodes. A masked episode is in no mean."""
    rewards = [0.0 if episode.truncated else episode.reward for episode in episodes if episode.reward is not None]
    low, high = wilson(sum(rewards) / len(rewards), len(rewards)) if rewards else (0.0, 1.0)
    return {
        "sessions": len(episodes),
        "masked": len(episodes) - len(rewards),
        "truncated": sum(episode.truncated for episode in episodes),
        "reward": sum(rewards) / max(1, len(rewards)),
        "interval": [low, high],
        "sampled": sum(episode.trajectory.fidelity.sampled_tokens for episode in episodes),
    }
