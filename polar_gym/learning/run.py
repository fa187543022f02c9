"""A training run: start model, steps of GRPO, evaluation on held-out tasks. A stopped run goes on where it was.

The files of a run, in its directory:

    plan.json                  the arguments, and the versions of the harnesses; a run goes on only with the same ones
    tasks/                     the tasks for training, and the held-out ones; of your own, their ids
    demonstrations.jsonl, sft/ the careless agent's episodes, and their rows
    start/                     the start model
    episodes/                  every episode, a file for each step and each evaluation
    state/                     the journals of all sessions, unless the config names another `rollout.state`
    steps.jsonl                a line for each step and each evaluation: rewards, tokens, CPU seconds, memory
    last.pt                    the weights and the optimizer after the last step
    curve.svg                  the reward on held-out tasks
    lock                       locked by the process that runs
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from polar_gym import durable
from polar_gym.config.run_config import RunConfig
from polar_gym.engines.weights import INITIAL
from polar_gym.errors import ConfigError, UnavailableError, how_to_install, kind_of
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.harnesses import HARNESSES
from polar_gym.learning.environments import Assignment, Environments
from polar_gym.learning.families import Split, write_tasks
from polar_gym.learning.files import append_row, read_rows, write_episodes
from polar_gym.learning.grpo import MakeRows, Settings, Trainer, choose, rows_of
from polar_gym.learning.meter import Meter, peak_mib
from polar_gym.learning.model import Size, on_gpu
from polar_gym.learning.report import check_scored, curve, figures, sentence, tracked_line
from polar_gym.learning.start import make_start_model
from polar_gym.record import digest
from polar_gym.schema import Episode
from polar_gym.tasks import Task
from polar_gym.tracking import Log, tracked

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
    """Tasks that the careless agent plays, in each harness."""
    train_tasks: int = 200
    held_out: int = 32
    """Sessions of an evaluation on the way."""
    final: int = 200
    """Sessions of the first and of the last evaluation. Where there are fewer tasks, tasks are played again."""
    places: int = 16
    """Sessions at once."""
    only_tested: tuple[str, ...] = ()
    """Harnesses that are in no step: only the first and the last evaluation play in them."""
    overlap: bool = False
    """The sessions of a step begin before the update of the step before, and go on under its weights: one step
    off-policy. An evaluation waits for all sessions."""
    size: Size = field(default_factory=Size)
    """The size of the start model, where it is made here."""
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
        self,
        directory: Path,
        plan: Plan,
        configs: Mapping[str, RunConfig],
        progress: Callable[[str], None],
        make_rows: MakeRows = rows_of,
    ) -> None:
        """`configs`: harness -> its config; the groups of a step take turns with them, and evaluations on the way play
        in the first. `make_rows` makes the rows of a step; a control of an experiment may spoil them. Raises
        `ConfigError` where the directory has a run of another plan, or of another version of a harness, or where a
        package is missing."""
        self.directory, self.plan = directory, plan
        self._progress, self._make_rows, self._meter = progress, make_rows, Meter()
        self._trained = [harness for harness in configs if harness not in plan.only_tested]
        state = (directory / "state").absolute()  # episodes name it, and are read anywhere
        kept = {name: config.with_rollout(state=config.rollout.state or state) for name, config in configs.items()}
        self._configs = self._checked(kept)
        self._log: Log = lambda figures, step: None
        if missing := [name for name in ("torch", "transformers", "pyarrow") if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"{', '.join(missing)}: missing; install with: {how_to_install('torch', 'export')}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise kind_of(error)(
                f"--out={directory}: {error.strerror}; name a directory that can be written"
            ) from error
        durable.write(directory / "plan.json", _plan(plan, self._configs).encode())

    def _checked(self, configs: Mapping[str, RunConfig]) -> dict[str, RunConfig]:
        """Return the configs, which tell harnesses the day on which the run began. Raises `ConfigError`."""
        path = self.directory / "plan.json"
        if not path.exists():
            return dict(configs)
        before = _without_keys(json.loads(path.read_bytes()))  # earlier versions wrote them
        began_with = before.pop("versions", {})  # earlier versions of polar-gym did not write it
        days = {
            harness: date.fromisoformat(day)
            for harness, config in before.get("configs", {}).items()
            if (day := config.get("harness", {}).get("today"))
        }
        again = {harness: config.on(days.get(harness)) for harness, config in configs.items()}
        in_order = list(before.get("configs", {})) == list(again)  # the first harness is that of the evaluations
        now = json.loads(_plan(self.plan, again))
        versions = now.pop("versions")
        before.setdefault("timeouts", now["timeouts"])  # nor did they write timeouts
        if before != now or not in_order:
            raise ConfigError(f"--out={self.directory}: a run with other arguments is there ({path}); choose another")
        for harness, then in began_with.items():
            if then != versions[harness]:
                raise ConfigError(
                    f"--out={self.directory}: the run there began with {harness} {then}, and this polar-gym has "
                    f"{harness} {versions[harness]}, which may write other prompts; choose another directory, or "
                    f"go on with the polar-gym that has {harness} {then}"
                )
        return again

    def go(self) -> list[dict[str, Any]]:
        """Run, or go on, to the end. Return the lines of `steps.jsonl`. Raises `ConfigError` where another process runs
        in the directory."""
        config = next(iter(self._configs.values()))
        parameters = {**config.names, "harness": "+".join(self._configs), "family": self.plan.family}
        try:
            lock = durable.locked(self.directory / "lock", wait=False)
        except BlockingIOError as error:
            told = f"--out={self.directory}: another process trains there; wait for its end, or choose another"
            raise UnavailableError(told) from error
        with lock, tracked(config.rollout.metrics, self.directory.name, self.directory, parameters) as self._log:
            if (written := self.directory / "steps.jsonl").exists():
                durable.cut_torn_line(written)
            return self._go()

    def prepare(self) -> tuple[Tasks, Path]:
        """Make the tasks and the start model where they are missing. Return the tasks, and the model's directory."""
        tasks = self._tasks()
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        return tasks, self._start_model()

    def _go(self) -> list[dict[str, Any]]:
        tasks, start = self.prepare()
        transformers: Any = importlib.import_module("transformers")
        # In another dtype small updates are lost.
        model = on_gpu(transformers.AutoModelForCausalLM.from_pretrained(start, dtype="float32"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(start)
        grpo = replace(self.plan.grpo, learning_rate=self.plan.grpo.learning_rate * self.plan.size.scale)
        trainer = Trainer(model, grpo, tokenizer.pad_token_id or 0)
        done = self._restore(trainer)
        engine = {"policy": "transformers", "model_path": str(start), "dtype": "float32"}
        plan = self.plan
        with Environments(
            self._configs, places=plan.places, seed=plan.seed, tasks=tasks.source, engine=engine
        ) as environments:
            if done:
                environments.set_weights(model.state_dict(), _version(done))
            self._train(environments, trainer, tasks, done)
        lines = self._written()
        durable.write(self.directory / "curve.svg", curve({self.directory.name: lines}).encode())
        return lines

    def _train(self, environments: Environments, trainer: Trainer, tasks: Tasks, done: int) -> None:
        ahead: Future[list[Episode]] | None = None
        with ThreadPoolExecutor(1) as pool:
            for step in range(done, self.plan.steps + 1):
                self._evaluate_where_due(environments, tasks.held_out, step)
                if step == self.plan.steps:
                    return
                with self._meter.measured("rollout"):
                    episodes = ahead.result() if ahead else self._sessions(environments, tasks.train, step)
                if self.plan.overlap and step + 1 < self.plan.steps and not self._is_due(step + 1):
                    ahead = pool.submit(self._sessions, environments, tasks.train, step + 1)
                else:
                    ahead = None
                self._step(environments, trainer, episodes, step)

    def _step(self, environments: Environments, trainer: Trainer, episodes: Sequence[Episode], step: int) -> None:
        with self._meter.measured("training"):
            batch = self._make_rows(episodes)
            losses = trainer.update(batch.rows, _version(step), step / self.plan.steps)
        environments.set_weights(trainer.model.state_dict(), _version(step + 1))
        counts = {
            "trained": sum(int(row.loss_mask.sum()) for row in batch.rows),
            "forward": sum(len(row.token_ids) for row in batch.rows),
        }
        self._write({"step": step + 1, **figures(episodes), **losses, **counts})
        self._save(trainer, step + 1)

    def _sessions(self, environments: Environments, task_ids: Sequence[str], step: int) -> list[Episode]:
        chosen = choose(task_ids, self.plan.grpo, self.plan.seed, step)
        sessions = [
            (self._trained[index // self.plan.grpo.samples % len(self._trained)], task_id, index)
            for index, task_id in enumerate(chosen, start=step * len(chosen))
        ]
        return self._play(environments, sessions, f"step-{step + 1:03}", {})

    def _is_due(self, step: int) -> bool:
        """Return whether the weights after a step are evaluated."""
        return step % self.plan.evaluate_every == 0 or step == self.plan.steps

    def _evaluate_where_due(self, environments: Environments, task_ids: Sequence[str], step: int) -> None:
        """Evaluate on held-out tasks in the first harness; at the start and at the end in all of them."""
        if not self._is_due(step):
            return
        edge = step in (0, self.plan.steps)
        done = [
            (line["evaluated"], line["greedy"], line.get("harness")) for line in self._written() if "evaluated" in line
        ]
        first, *others = self._configs
        wanted = [(None, True)] if step == 0 else []
        wanted += [(harness, False) for harness in (None, *(others if edge else ()))]
        for harness, greedy in wanted:
            if (step, greedy, harness) in done:
                continue
            some = islice(cycle(task_ids), self.plan.final if edge else self.plan.held_out)
            name = f"held-out-{step:03}{f'-{harness}' if harness else ''}{'-greedy' if greedy else ''}"
            action = {"temperature": 0.0} if greedy else {}
            before = step * max(self.plan.held_out, self.plan.final)
            sessions = [(harness or first, task_id, index) for index, task_id in enumerate(some, start=before)]
            with self._meter.measured("rollout"):
                episodes = self._play(environments, sessions, name, action)
            line = {"evaluated": step, "greedy": greedy, **({"harness": harness} if harness else {})}
            self._write({**line, **figures(episodes)})

    def _play(
        self, environments: Environments, sessions: Sequence[Assignment], name: str, action: dict[str, Any]
    ) -> list[Episode]:
        """Return the episode of each session, after they are written. Raises `ConfigError` where none has a reward."""
        episodes = environments.play(sessions, action)
        path = self.directory / "episodes" / f"{name}.jsonl"
        write_episodes(path, episodes)
        check_scored(episodes, path)
        return episodes

    def _tasks(self) -> Tasks:
        """Return the family's tasks; without a family, the config's, of which every fifth is held out. Raises
        `ConfigError` where none is left for training."""
        if self.plan.family is None:
            config = next(iter(self._configs.values()))
            own = load_tasks(config)
            ids = [task.instance_id for task in own]
            held_out = ids[::OWN_HELD_OUT]
            train = [task_id for task_id in ids if task_id not in held_out]
            if not train:
                raise ConfigError(
                    f"tasks={config.tasks.name}: found {len(ids)}, which is held out, and none is left for training; "
                    "name at least two tasks (check tasks.limit and tasks.instance_ids)"
                )
            self._keep_tasks({"train": train, "held_out": held_out, "digest": _digest(own)})
            return Tasks(config.tasks.model_dump(mode="json"), train, held_out)
        train = self._write_tasks("train", self.plan.train_tasks)
        held_out = self._write_tasks("held_out", self.plan.final)
        both = self.directory / "tasks" / "all.jsonl"
        durable.write(both, train.read_bytes() + held_out.read_bytes())
        return Tasks({"name": "jsonl", "path": str(both)}, _ids(train), _ids(held_out))

    def _keep_tasks(self, tasks: dict[str, Any]) -> None:
        """Write the ids of the user's tasks, and the digest of all. Raises `ConfigError` where the run began with
        others. Runs of earlier checkouts have no digest."""
        path = self.directory / "tasks" / "ids.json"
        earlier = json.loads(path.read_bytes()) if path.exists() else tasks
        if {"digest": tasks["digest"], **earlier} != tasks:
            why = "and may have trained on tasks that are held out now"
            if all(earlier[split] == tasks[split] for split in ("train", "held_out")):
                why = "with the same ids: their texts or their tests have changed"
            raise ConfigError(
                f"--out={self.directory}: the run there began with other tasks ({path}), {why}; choose another "
                "directory, or name the tasks of before"
            )
        path.parent.mkdir(exist_ok=True)
        durable.write(path, json.dumps(tasks).encode())

    def _write_tasks(self, split: Split, count: int) -> Path:
        assert self.plan.family is not None
        return write_tasks(self.directory / "tasks", self.plan.family, split, self.plan.seed, count)

    def _start_model(self) -> Path:
        """Return the directory of the start model: the user's, or one that is made where it is missing."""
        given = next(iter(self._configs.values())).engine.options.get("model_path")
        if given is not None:
            return Path(given)
        plan = self.plan
        assert plan.family is not None
        start = make_start_model(
            self.directory,
            self._configs,
            plan.family,
            plan.seed,
            plan.demonstrations,
            self._meter,
            self._progress,
            plan.size,
            plan.places,
        )
        if self._meter.used("cold_start"):
            self._write({"cold_start": True})
        return start

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
        state = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {"step": 0}
        if written := self._written():
            lines = [line for line in written if line.get("step", 0) <= state["step"]]  # a later one was not saved
            durable.write(self.directory / "steps.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        if state["step"]:
            trainer.model.load_state_dict(state["model"])
            trainer.optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def _written(self) -> list[dict[str, Any]]:
        path = self.directory / "steps.jsonl"
        return read_rows(path) if path.exists() else []

    def _write(self, line: dict[str, Any]) -> None:
        line |= {**self._meter.take(), "peak_mib": peak_mib()}
        append_row(self.directory / "steps.jsonl", line)
        self._log(*tracked_line(line))
        self._progress(sentence(line))


def _plan(plan: Plan, configs: Mapping[str, RunConfig]) -> str:
    """Return the text of `plan.json`."""
    settings = {harness: config.model_dump(mode="json", exclude={"rollout"}) for harness, config in configs.items()}
    timeouts = {harness: config.rollout.timeout_seconds for harness, config in configs.items()}
    versions = {harness: HARNESSES.get(harness).pinned for harness in configs}
    text = {"plan": asdict(plan), "configs": settings, "timeouts": timeouts, "versions": versions}
    return json.dumps(_without_keys(text), indent=1) + "\n"


def _without_keys(value: Any) -> Any:
    """Return settings without the API keys of engines: a file holds none, and a run that goes on may have others."""
    if isinstance(value, dict):
        return {name: _without_keys(each) for name, each in value.items() if name != "api_key"}
    return value


def _version(step: int) -> str:
    """Return the name of the weights after a step."""
    return f"step-{step}" if step else INITIAL


def _digest(tasks: Sequence[Task]) -> str:
    """Return a digest of tasks, without what has no part in a session or its grading."""
    return digest(*(task.model_dump(mode="json", exclude={"place", "audit"}) for task in tasks))


def _ids(tasks: Path) -> list[str]:
    return [row["instance_id"] for row in read_rows(tasks)]
