"""Reproduce a row of Polar's table (arXiv 2605.24220): GRPO of Qwen3.5-4B through one harness, with NeMo RL.

    python "$(polar-gym nemo-recipes)/reproduce.py" codex --data /data/swe --out results [KEY=VALUE]...

DATA holds `train_tasks.jsonl` (SkyRL-v0-293-data) and `validation_tasks.jsonl` (SWE-bench Verified), in SWE-bench's
field names. KEY=VALUE are settings of polar-gym for training and evaluation, e.g. `runtime=docker`. The stages:

    preflight   GPUs, memory, disk, images, data, NeMo RL, hours; `--preflight` stops after this one
    rows        the rows that NeMo Gym deals out
    base        the base model: do its tool calls work, and which share of the validation tasks does it solve?
    train       one epoch of GRPO, with every trace of a session
    trained     the same share after training
    report      the table, beside the paper's figures

A stage that ended leaves OUT/HARNESS/STAGE.json and is not run a second time. So the same command goes on after any
end: training from its newest checkpoint, an evaluation after its last finished part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rich.table import Table
from rich.text import Text

from polar_gym import durable
from polar_gym.cli.doctor import can_run, diagnose
from polar_gym.config.loading import load_config
from polar_gym.console import console
from polar_gym.episodes.pass_at_k import pass_at_k, tally
from polar_gym.episodes.reading import read_episodes
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.tasks import Task

HERE = Path(__file__).parent
PAPER = {"codex": (3.8, 26.4), "claude_code": (29.8, 34.6), "qwen_code": (34.6, 35.2), "pi": (34.2, 40.4)}
"""Harness -> the solved share of SWE-bench Verified in percent, of the base model and after RL, as the paper says."""
TRAIN_TASKS, TASKS_OF_A_STEP = 293, 4
STEP_MINUTES = 11.7
"""The paper's minutes for a step: 35.2 for three."""
GPUS, GPU_GIB = 8, 79
MEMORY_GIB = 384
"""64 sandboxes of 2 GiB, and 256 GiB for the processes of the trainer and the engine."""
DISK_GIB = 500
"""Three checkpoints of weights and Adam's moments (64 GB each), the converted model, episodes and logs."""
PART = 50
"""The tasks of one part of an evaluation."""
TRIAL = 4
"""The tasks on which tool calls are tried."""
URL = "http://127.0.0.1:8011"
SERVE = "--enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3"
SERVE_SECONDS = 1800
GPU_SECONDS = 10
"""The time between two looks at the GPUs."""
AGENT = "env.nemo_gym.polar_swe_agent.responses_api_agents.polar_agent.polar"
FINAL_ONLY = ("grpo.val_period=0", "grpo.val_at_start=false", "checkpointing.metric_name=null")
"""Overrides of the recipe: the stages `base` and `trained` evaluate, so NeMo RL keeps its newest checkpoints."""


@dataclass(frozen=True)
class Run:
    """One reproduction, as the command line asks for it."""

    harness: str
    data: Path
    out: Path
    nemo_rl: Path
    model: str
    settings: list[str]

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of `train` or `validation`. Raises `ConfigError`."""
        return load_tasks(load_config(overrides=self.source(split)))

    def source(self, split: str) -> list[str]:
        own = [setting for setting in self.settings if setting.startswith("tasks.")]
        return ["tasks=jsonl", f"tasks.path={self.data / f'{split}_tasks.jsonl'}", *own]

    @cached_property
    def environment(self) -> dict[str, str]:
        root = subprocess.run(["polar-gym", "nemo-root"], check=True, capture_output=True, text=True).stdout.strip()
        own = {"NEMO_RL": self.nemo_rl, "POLAR_DATA": self.data, "NEMO_GYM_EXTRA_ROOTS": root}
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    def call(self, *command: str | Path, accepted: Sequence[int] = (0,), stdout: IO[bytes] | None = None) -> None:
        """Run a command in NeMo RL's directory. Exit where its status is not accepted."""
        words = [str(word) for word in command]
        console.print(Text(shlex.join(words), "dim"), soft_wrap=True)
        status = subprocess.run(words, cwd=self.nemo_rl, env=self.environment, stdout=stdout, check=False).returncode
        if status not in accepted:
            sys.exit(f"{words[0]} ended with status {status}; run the same command again to go on from here")


@dataclass(frozen=True)
class Check:
    """One thing that the run needs. `fix` is empty where the machine has it."""

    name: str
    found: str
    fix: str = ""


def preflight(run: Run) -> dict[str, Any]:
    """Check the machine and the data before any hour is spent. Exit where something is missing."""
    checks = [*gpus(), *machine(run), *harness(run), *data(run), *trainer(run), hours()]
    table = Table("", "part", "found", title=f"preflight of {run.harness}", title_justify="left")
    for each in checks:
        state = Text("lacks", "bold red") if each.fix else Text("ok", "green")
        table.add_row(state, each.name, Text(each.found + (f"\nfix: {each.fix}" if each.fix else "")))
    console.print(table)
    if missing := [each.name for each in checks if each.fix]:
        sys.exit(f"missing: {', '.join(missing)}")
    return {each.name: each.found for each in checks}


def gpus() -> list[Check]:
    sizes = [line.split(",")[1] for line in gpu_lines()]
    enough = sum(float(size) >= GPU_GIB * 1024 for size in sizes) >= GPUS
    found = f"{len(sizes)}, of {', '.join(sorted(set(sizes)))} MiB" if sizes else "none that nvidia-smi shows"
    return [Check("GPUs", found, "" if enough else f"{GPUS} of {GPU_GIB} GiB or more: the recipe's split needs them")]


def gpu_lines() -> list[str]:
    """Return `utilisation, MiB` of each GPU; nothing without a driver."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]) is None:
        return []
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.splitlines()


def machine(run: Run) -> list[Check]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    free = shutil.disk_usage(run.out).free / 1024**3
    held = sum(path.lstat().st_size for path in run.out.rglob("*")) / 1024**3
    disk = f"{free:.0f} GiB free at {run.out}, which holds {held:.0f}"
    return [
        Check("memory", f"{memory:.0f} GiB", "" if memory >= MEMORY_GIB else f"{MEMORY_GIB} GiB for 64 sessions"),
        Check("disk", disk, "" if free + held >= DISK_GIB else f"{DISK_GIB} GiB; see --out"),
    ]


def harness(run: Run) -> list[Check]:
    known = diagnose()
    own = [each for each in known if each.name == f"harness {run.harness}" or each.kind == "node"]
    usable = [each.name.removeprefix("runtime ") for each in known if each.kind == "runtime" and each.ok]
    runtimes = Check("runtimes", ", ".join(usable) or "none", "" if can_run(known) else "see `polar-gym doctor`")
    return [runtimes, *(Check(each.name, each.found, each.fix) for each in own)]


def data(run: Run) -> list[Check]:
    checks, images = [], set()
    for split, wanted in (("train", TRAIN_TASKS), ("validation", None)):
        try:
            tasks = run.tasks(split)
        except ConfigError as error:
            checks.append(Check(f"{split} tasks", "cannot be read", str(error)))
            continue
        images |= {task.image for task in tasks if task.image}
        other = wanted is not None and len(tasks) != wanted
        checks.append(Check(f"{split} tasks", str(len(tasks)), f"the paper trains on {wanted}" if other else ""))
    if images and shutil.which("docker") is None:
        return [*checks, Check("images", f"{len(images)} are named", "the tasks need Docker")]
    absent = sorted(image for image in images if not has_image(image))
    listing = run.out / "missing_images.txt"
    listing.write_text("".join(f"{image}\n" for image in absent))
    fix = f"xargs -n 1 -P 4 docker pull < {listing}" if absent else ""
    return [*checks, Check("images", f"{len(images) - len(absent)} of {len(images)}", fix)]


def has_image(name: str) -> bool:
    return not subprocess.run(["docker", "image", "inspect", name], check=False, capture_output=True).returncode


def trainer(run: Run) -> list[Check]:
    source = run.nemo_rl / "nemo_rl" / "experience" / "rollouts.py"
    recent = source.exists() and "should_mask_flagged_samples" in source.read_text()
    fix = "a checkout of NeMo RL's main after 2026-07-31: --nemo-rl DIR, or the variable NEMO_RL"
    uv = Check("uv", shutil.which("uv") or "not on PATH", "" if shutil.which("uv") else "NeMo RL's container has it")
    return [Check("NeMo RL", str(run.nemo_rl), "" if recent else fix), uv]


def hours() -> Check:
    steps = TRAIN_TASKS // TASKS_OF_A_STEP
    found = f"{steps} steps, {steps * STEP_MINUTES / 60:.0f} hours at the paper's {STEP_MINUTES} minutes a step"
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        found += f"; this job ends in {(float(end) - time.time()) / 3600:.1f} hours, the same command then goes on"
    return Check("hours", found)


def rows(run: Run) -> dict[str, Any]:
    """Write the rows of the data sets for NeMo Gym."""
    for split, agent in (("train", "polar_swe_agent"), ("validation", "polar_swe_eval_agent")):
        with durable.replacing(run.data / f"{split}_rows.jsonl") as file:
            run.call(sys.executable, "-m", "polar_gym.nemo.rows", "--agent", agent, *run.source(split), stdout=file)
    return {}


@contextlib.contextmanager
def serving(run: Run, model: str, log: Path) -> Iterator[None]:
    """Serve a model on all GPUs at `URL`. Exit where another server is there, or vLLM ends before it answers."""
    if answers():
        sys.exit(f"{URL} answers before vLLM is started: stop that server, it may have another model")
    command = ["uv", "run", "--extra", "vllm", "vllm", "serve", model, "--tokenizer", run.model, "--port"]
    command += [URL.rpartition(":")[2], "--data-parallel-size", str(GPUS), *shlex.split(SERVE)]
    console.print(Text(shlex.join(command), "dim"), soft_wrap=True)
    with log.open("ab") as file, subprocess.Popen(command, cwd=run.nemo_rl, stdout=file, stderr=file) as server:
        try:
            deadline = time.monotonic() + SERVE_SECONDS
            while not answers():
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"vLLM does not serve {model}: see {log}")
                time.sleep(1)
            yield
        finally:
            server.terminate()


def answers() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def base(run: Run) -> dict[str, Any]:
    """Evaluate the base model. Exit where none of its tool calls works: a run without any learns nothing."""
    with serving(run, run.model, run.out / "vllm_base.log"):
        names = [task.instance_id for task in run.tasks("validation")]
        roll_out(run, names[:TRIAL], run.out / "trial.jsonl")
        trial = read_episodes(run.out / "trial.jsonl")
        attempts = Counter(attempt.status for episode in trial for attempt in episode.trajectory.tool_attempts)
        if not attempts["ok"]:
            sys.exit(f"no tool call worked in {TRIAL} sessions ({dict(attempts)}): see {run.out / 'trial.jsonl'}")
        return {"tool_calls": dict(attempts), **evaluate(run, names, "base")}


def trained(run: Run) -> dict[str, Any]:
    """Convert the newest checkpoint to Hugging Face's form, and evaluate that model."""
    checkpoint = max(run.out.glob("checkpoints/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    model = run.out / "model"
    if not model.exists():
        (weights,) = checkpoint.glob("policy/weights/iter_*")
        part = run.out / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        converter = ("uv", "run", "--extra", "mcore", "python", "examples/converters/convert_megatron_to_hf.py")
        names = ("--config", checkpoint / "config.yaml", "--hf-model-name", run.model)
        run.call(*converter, *names, "--megatron-ckpt-path", weights, "--hf-ckpt-path", part)
        part.rename(model)
    with serving(run, str(model), run.out / "vllm_trained.log"):
        names = [task.instance_id for task in run.tasks("validation")]
        return {"checkpoint": checkpoint.name, **evaluate(run, names, "trained")}


def evaluate(run: Run, names: Sequence[str], stage: str) -> dict[str, Any]:
    """Return pass@1 in percent. Each part that ended is kept."""
    files = [run.out / f"{stage}-{first:04d}.jsonl" for first in range(0, len(names), PART)]
    for place, file in enumerate(files):
        if not file.exists():
            roll_out(run, names[place * PART :][:PART], beside := file.with_suffix(".part"))
            if not answers():
                sys.exit(f"vLLM died: see {run.out}/vllm_{stage}.log; run the same command again to go on from here")
            beside.rename(file)
    tallies = tally(list(chain.from_iterable(map(read_episodes, files))))
    found = pass_at_k(tallies, 1)
    values = {name: getattr(found, name) for name in ("value", "low", "high")}
    percent = {name: None if value is None else round(100 * value, 1) for name, value in values.items()}
    return {"percent": percent, "masked": sum(each.masked for each in tallies)}


def roll_out(run: Run, names: Sequence[str], output: Path) -> None:
    settings = [f"harness={run.harness}", f"engine.url={URL}", *run.source("validation"), *run.settings]
    chosen = f"tasks.instance_ids=[{','.join(names)}]"
    run.call("polar-gym", "rollout", "swe_eval", *settings, chosen, f"rollout.output={output}", accepted=(0, 1))
    if (found := len(output.read_bytes().splitlines())) < len(names):
        sys.exit(f"polar-gym crashed after {found} of {len(names)} sessions; run the same command again")


def train(run: Run) -> dict[str, Any]:
    """Train from the newest checkpoint to the end of the epoch."""
    own = [f"++{AGENT}.{setting}" for setting in run.settings]
    places = [f"checkpointing.checkpoint_dir={run.out / 'checkpoints'}", f"logger.log_dir={run.out / 'logs'}"]
    config = HERE / f"grpo_{run.harness}_all_traces.yaml"
    stop = threading.Event()
    watch = threading.Thread(target=watch_gpus, args=(run.out / "gpus.jsonl", stop))
    watch.start()
    try:
        words = (*FINAL_ONLY, f"policy.model_name={run.model}", *places, *own)
        run.call("uv", "run", HERE / "run_grpo.py", "--config", config, *words)
    finally:
        stop.set()
        watch.join()
    return {}


def watch_gpus(path: Path, stop: threading.Event) -> None:
    """Write the time of the first look, the present time and each GPU's utilisation in percent, until `stop` is set. A
    kill leaves whole lines, so that `report` knows the hours of that attempt."""
    begun, ends = time.time(), False
    while not ends:
        ends = stop.wait(GPU_SECONDS)
        use = [int(line.split(",")[0]) for line in gpu_lines()]
        with path.open("a") as file:
            file.write(json.dumps([begun, time.time(), *use]) + "\n")


def report(run: Run) -> dict[str, Any]:
    """Print the row of the table, and return its figures."""
    steps = logged_steps(run.out / "logs")
    rewards = [metrics["total_reward/mean"] for _, metrics in sorted(steps.items())]
    looks = lines(run.out / "gpus.jsonl")
    ends = {begun: now for begun, now, *_ in looks}
    seconds = sum(end - begun for begun, end in ends.items())
    use = list(chain.from_iterable(percents for _, _, *percents in looks))
    stages = [json.loads((run.out / f"{stage}.json").read_text()) for stage in ("base", "trained")]
    figures = {
        "base": stages[0]["percent"],
        "RL": stages[1]["percent"],
        "masked in the base's evaluation": stages[0]["masked"],
        "masked in RL's evaluation": stages[1]["masked"],
        "first ten steps": statistics.mean(rewards[:10]),
        "last ten steps": statistics.mean(rewards[-10:]),
        "updates": len(rewards),
        "hours": seconds / 3600,
        "GPU utilisation, percent": statistics.mean(use) if use else None,
    }
    table = Table("", "base", "RL", title=f"{run.harness}: solved share of the validation tasks, percent")
    table.add_row("paper", *map(str, PAPER[run.harness]))
    table.add_row("here", *("{value} ({low} to {high})".format_map(stage["percent"]) for stage in stages))
    console.print(table)
    for name in list(figures)[2:]:
        console.print(f"{name}: {'unknown' if figures[name] is None else format(figures[name], '.3g')}")
    return figures


def logged_steps(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step; of a step that was repeated after a checkpoint, those of the last time."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in chain.from_iterable(map(lines, sorted(directory.glob("exp_*/metrics.jsonl")))):
        if entry["prefix"] == "train":
            steps.setdefault(entry["step"], {}).update(entry["metrics"])
    return steps


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


STAGES = (preflight, rows, base, train, trained, report)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reproduce a row of Polar's table with NeMo RL.")
    parser.add_argument("harness", choices=PAPER)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of polar-gym, e.g. runtime=docker")
    parser.add_argument("--data", type=Path, required=True, help="the directory of the two files of tasks")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the results of all harnesses")
    parser.add_argument("--nemo-rl", type=Path, default=Path(os.environ.get("NEMO_RL", "/opt/nemo-rl")))
    parser.add_argument("--model", default="Qwen/Qwen3.5-4B", help="default: %(default)s")
    parser.add_argument("--preflight", action="store_true", help="check the machine and stop")
    asked = parser.parse_intermixed_args()
    run = Run(
        asked.harness,
        asked.data.resolve(),
        asked.out.resolve() / asked.harness,
        asked.nemo_rl.resolve(),
        asked.model,
        asked.settings,
    )
    run.out.mkdir(parents=True, exist_ok=True)
    for stage in STAGES[:1] if asked.preflight else STAGES:
        done = run.out / f"{stage.__name__}.json"
        if done.exists() and stage is not preflight and stage is not report:
            console.print(Text(f"{stage.__name__}: done before, see {done}"))
            continue
        console.rule(stage.__name__)
        durable.write(done, json.dumps(stage(run), indent=2).encode())


if __name__ == "__main__":
    main()
