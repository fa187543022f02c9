"""Kill runs of real harnesses with SIGKILL in each of their calls, and resume them: `make show-resume`.

A run is a process of `polar-gym rollout` with one session. Its engine kills the process while it answers call k, with
no token of the answer or with the first ones in the journal, so that the run dies at every call index in turn.
`polar-gym rollout --resume` then goes on, and the episode is held against that of the same session undisturbed. The
policy is instant: an undisturbed session takes the time of the harness and its tools alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.episodes.verify import verify
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.harnesses import HARNESSES
from polar_gym.schema import Episode, ModelCall
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import BundledTasks
from polar_gym.tasks.request import reference_script
from polar_gym.tasks.rows import Selection
from tests.show.result import OF_NPM, Result, make_parser, parse
from tests.support.docker_daemon import own_daemon, running_daemon
from tests.support.processes import POLAR_GYM

DIED, CONTINUED, ONCE, REWARDED, BOOKS = LAWS = (
    "every run died by SIGKILL in the call that was chosen",
    "at least 95 % of the killed sessions of each harness went on with the recorded ids",
    "no recorded token was sampled a second time",
    "every resumed session has the reward of the undisturbed one",
    "verify finds no fault in the episode of a resumed session",
)
GOAL = 0.95
CHANGING = "date +%H:%M:%S.%N; mktemp -d; cat /proc/sys/kernel/random/uuid; shuf -i 1-1000000 -n 1"
"""A command whose output differs in every run, in ways that are normal and in one that is not."""
CASES = ("task", "sub-agents", "compaction")
LACKS = {("pi", "sub-agents"), ("gemini_cli", "compaction")}
"""No such sessions: pi has no sub-agents, and Gemini CLI takes its context for a million tokens."""
ACTING = {"task": "Dying", "sub-agents": "DyingDelegating", "compaction": "DyingCompacting"}
TURNS = {"match": "", "commands": [CHANGING, "ls -a", CHANGING, "seq 1 50"], "final_message": "Done."}


@dataclass(frozen=True, eq=False)
class Play:
    """A session that can be repeated."""

    harness: str
    case: str
    task: Task
    runtime: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.harness}, {self.case}, {self.task.instance_id}"

    def arguments(self, directory: Path, **engine: Any) -> list[str]:
        """Return the settings of a run, whose recipe is written into the directory."""
        recipe = {
            "defaults": [
                "config",
                {"override harness": self.harness},
                {"override runtime": self.runtime["name"]},
                "_self_",
            ],
            "engine": {
                "name": f"tests.e2e.dying_engine:{ACTING[self.case]}",
                "policy": "scripted",
                "scripts": [self._script()],
                **engine,
            },
            "runtime": dict(self.runtime),
            "tasks": {"instance_ids": [self.task.instance_id]},
            "rollout": {"output": str(directory / "run.jsonl"), "timeout_seconds": 900},
        }
        if self.case != "task":
            recipe["defaults"].insert(-1, {"override evaluator": "session_completion"})
        if self.case == "compaction":
            recipe["harness"] = {"profile": "lean"}
        (directory / "play.yaml").write_text(json.dumps(recipe))
        return ["play", "--config-dir", str(directory)]

    def _script(self) -> dict[str, Any]:
        if self.case != "task":
            return TURNS
        script = reference_script(self.task, HARNESSES.get(self.harness).ends_by)
        return {**script, "commands": [CHANGING, *script["commands"]]}


@dataclass(slots=True)
class Kill:
    """A killed run, and what became of its session."""

    play: Play
    call: int
    in_answer: bool
    status: int = 0
    """That of the killed process."""
    recorded: int = 0
    """Delivered calls in the journal."""
    replayed: int = 0
    cut: int = 0
    """Tokens of calls that were being answered: they are lost, and no harness had them."""
    sampled_twice: int = 0
    gateway_seconds: list[float] = field(default_factory=list)
    """Of each replayed call."""
    replay_seconds: float = 0.0
    """From the start of the harness to the last replayed call or the first new one."""
    extra_seconds: float = 0.0
    """Those of the resumed run of the harness beyond the undisturbed one."""
    differences: int = 0
    normal: int = 0
    """Those of the differences that are times, dates, durations, process ids, hashes and temporary paths."""
    volatile: Counter[str] = field(default_factory=Counter)
    reward: float | None = None
    cause: str = ""
    """Why the session did not go on with the recorded ids; empty: it did."""
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.play}, call {self.call}{', in its answer' if self.in_answer else ''}"


def rollout(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in the directory of the checkout, whose tests have the engine."""
    settled = {**os.environ, "TMPDIR": str(directory / "tmp"), "COLUMNS": "500"}
    (directory / "tmp").mkdir(exist_ok=True)
    command = [*POLAR_GYM, "rollout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=settled)


def undisturbed(play: Play) -> tuple[Episode, int]:
    """Return the episode of a session, and the number of its answered calls."""
    with tempfile.TemporaryDirectory(prefix="pg-resume-") as name:
        directory = Path(name)
        ended = rollout(directory, *play.arguments(directory))
        assert (directory / "run.jsonl").is_file(), f"{play}: {ended.stdout}{ended.stderr}"
        (episode,) = read_episodes(directory / "run.jsonl")
        assert episode.session.failure is None, f"{play}: {episode.session.failure}"
        return episode, sum(call.outcome == "delivered" for call in read_calls(episode))


def killed(play: Play, call: int, in_answer: bool, seconds: float) -> Kill:
    """Kill a run in a call, resume it, and return what was seen. `seconds`: those of the undisturbed harness."""
    kill = Kill(play, call, in_answer)
    with tempfile.TemporaryDirectory(prefix="pg-resume-") as name:
        directory = Path(name)
        output = directory / "run.jsonl"
        dies = {"dies_in_call": call, "in_answer": in_answer, "once": str(directory / "died")}
        arguments = play.arguments(directory, **dies)
        kill.status = rollout(directory, *arguments).returncode
        journals = list((directory / "run.state").glob("1/sessions/*/calls.jsonl"))
        record = [each for path in journals for each in read_journal(path)]
        ended = rollout(directory, *arguments, "--resume", str(output))
        episodes = list(read_episodes(output)) if output.is_file() and output.stat().st_size else []
        if not episodes:
            kill.cause = f"no episode: {(ended.stdout + ended.stderr).strip()[-600:]}"
            return kill
        _compare(kill, record, episodes, seconds)
    return kill


def _compare(kill: Kill, record: Sequence[ModelCall], episodes: Sequence[Episode], seconds: float) -> None:
    """Fill in what became of the recorded calls. `episodes`: one, or two where the first was retried."""
    first, last = episodes[0], episodes[-1]
    calls = {call.call_id: call for call in read_calls(first)}
    delivered = [call for call in record if call.outcome == "delivered"]
    kill.recorded, kill.reward = len(delivered), last.reward
    kill.cut = sum(len(call.response_ids) for call in record if call.outcome != "delivered")
    again = [calls[call.call_id] for call in delivered if _same(calls.get(call.call_id), call)]
    kill.replayed = len(again)
    kill.sampled_twice = sum(len(call.response_ids) for call in delivered) - sum(len(c.response_ids) for c in again)
    kill.gateway_seconds = [call.replayed.seconds for call in again if call.replayed is not None]
    kill.replay_seconds = first.session.timing.replay or 0.0
    kill.extra_seconds = sum(episode.session.timing.running or 0.0 for episode in episodes) - seconds
    for call in again:
        assert call.replayed is not None
        kill.differences += len(call.replayed.differences)
        kill.normal += sum(difference.only_volatile for difference in call.replayed.differences)
        kill.volatile.update(call.replayed.volatile)
    kill.broken = asyncio.run(verify([last], None)).broken
    if first.session.failure is not None:
        kill.cause = f"{first.session.failure.kind}: {first.session.failure.message[:600]}"
    elif kill.replayed < kill.recorded:
        kill.cause = f"the harness asked again for {kill.replayed} of {kill.recorded} recorded calls"
    else:
        new = [call for call in calls.values() if call.replayed is None and call.outcome == "delivered"]
        broken = [call for call in new if not _goes_on(call, calls)]
        kill.cause = f"call {broken[0].index} does not begin with the recorded ids" if broken else ""


def _same(found: ModelCall | None, recorded: ModelCall) -> bool:
    """Return whether a recorded call was given out again, with its ids."""
    if found is None or found.replayed is None or found.outcome != "delivered":
        return False
    return np.array_equal(found.prompt_ids, recorded.prompt_ids) and np.array_equal(
        found.response_ids, recorded.response_ids
    )


def _goes_on(call: ModelCall, calls: Mapping[str, ModelCall]) -> bool:
    """Return whether a new call begins with the ids of the replayed call that it continues, if it continues one."""
    parent = calls.get(call.parent_id or "")
    if parent is None or parent.replayed is None or call.continuation != "spliced":
        return call.continuation != "canonical" or parent is None or parent.replayed is None
    seen = np.concatenate([parent.prompt_ids, parent.response_ids])
    return np.array_equal(call.prompt_ids[: len(seen)], seen)


def plays(options: argparse.Namespace, runtimes: Mapping[str, Mapping[str, Any]]) -> Iterator[Play]:
    tasks = BundledTasks(Selection()).load()
    for harness in options.harness:
        for runtime in runtimes.values():
            for case in options.case:
                if (harness, case) not in LACKS:
                    for task in tasks[: options.tasks] if case == "task" else tasks[:1]:
                        yield Play(harness, case, task, runtime)


def show(options: argparse.Namespace, result: Result) -> list[Kill]:
    """Kill and resume every session in each of its calls, some sessions at once."""
    console = make_console()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(options.at_once) as threads:
        runtimes = {name: runtime_settings(name, stack) for name in options.runtime}
        chosen = list(plays(options, runtimes))
        whole = dict(zip(chosen, threads.map(undisturbed, chosen), strict=True))
        waiting = []
        for play, (episode, calls) in whole.items():
            seconds = episode.session.timing.running or 0.0
            moments = [(call, in_answer) for call in range(calls) for in_answer in (False, True)]
            spread = np.linspace(1, len(moments) - 1, options.kills or len(moments) - 1).round().astype(int)
            for call, in_answer in (moments[place] for place in sorted(set(spread.tolist()))):
                waiting.append(threads.submit(killed, play, call, in_answer, seconds))
        kills = []
        for each in waiting:
            kill = each.result()
            kills.append(kill)
            console.print(f"{kill}: {kill.cause or 'went on'}", markup=False, highlight=False, soft_wrap=True)
    result.check(DIED, [f"{kill}: status {kill.status}" for kill in kills if kill.status != -signal.SIGKILL])
    result.check(ONCE, [f"{kill}: {kill.sampled_twice} tokens" for kill in kills if kill.sampled_twice])
    result.check(REWARDED, [f"{kill}: {kill.reward}" for kill in kills if kill.reward != whole[kill.play][0].reward])
    result.check(BOOKS, [f"{kill}: {line}" for kill in kills for line in kill.broken])
    return kills


def runtime_settings(name: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the runtime's settings, after a daemon is found or started."""
    if name == "docker":
        return {"name": name, "host": running_daemon() or stack.enter_context(own_daemon())}
    return {"name": name}


def table_of(kills: Sequence[Kill], result: Result) -> Table:
    """Return the table of the harnesses, and keep their figures."""
    columns = (
        "kills",
        "went on",
        "calls replayed",
        "tokens twice",
        "tokens cut",
        "gateway ms",
        "extra s",
        "of the replay in the gateway",
        "differences",
    )
    table = Table("harness", *columns, title="Killed in each call and resumed; gateway ms and extra s: p50 / p95")
    for harness in dict.fromkeys(kill.play.harness for kill in kills):
        own = [kill for kill in kills if kill.play.harness == harness]
        went_on = [kill for kill in own if not kill.cause]
        in_gateway = [1000 * seconds for kill in own for seconds in kill.gateway_seconds]
        figures = {
            "kills": len(own),
            "went_on": len(went_on),
            "calls_replayed": sum(kill.replayed for kill in own),
            "tokens_sampled_twice": sum(kill.sampled_twice for kill in own),
            "tokens_cut_in_flight": sum(kill.cut for kill in own),
            "gateway_ms_a_call": _percentiles(in_gateway),
            "extra_seconds": _percentiles([kill.extra_seconds for kill in went_on]),
            "replay_seconds": _percentiles([kill.replay_seconds for kill in went_on]),
            "gateway_share": round(sum(in_gateway) / 1000 / max(1e-9, sum(kill.replay_seconds for kill in own)), 4),
            "differences": sum(kill.differences for kill in own),
            "normal_differences": sum(kill.normal for kill in own),
            "volatile": dict(sum((kill.volatile for kill in own), Counter())),
            "by_case": {
                case: f"{sum(not kill.cause for kill in own if kill.play.case == case)} of {count}"
                for case, count in Counter(kill.play.case for kill in own).items()
            },
            "causes": dict(Counter(kill.cause for kill in own if kill.cause)),
        }
        result.figures[harness] = figures
        shown = [str(figures[name]) for name in list(figures)[:5]]
        p50_p95 = ["{:.1f} / {:.1f}".format(*figures[name]) for name in ("gateway_ms_a_call", "extra_seconds")]
        differences = f"{figures['normal_differences']} of {figures['differences']} normal"
        table.add_row(harness, *shown, *p50_p95, f"{figures['gateway_share']:.1%}", differences)
        few = len(went_on) < GOAL * len(own)
        result.check(CONTINUED, [f"{harness}: {len(went_on)} of {len(own)}: {figures['causes']}"] if few else [])
    return table


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    p50, p95 = np.percentile(values or [0.0], (50, 95))
    return round(float(p50), 2), round(float(p95), 2)


def main() -> int:
    parser = make_parser("resume", __doc__, quick="docker, four harnesses, all cases but tasks, and most calls")
    parser.add_argument("--harness", action="append", choices=OF_NPM, help="only this one; may be given repeatedly")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given repeatedly")
    parser.add_argument(
        "--runtime", action="append", choices=("bubblewrap", "docker"), help="only this one; may be given repeatedly"
    )
    parser.add_argument("--tasks", type=int, default=4, help="how many bundled tasks (default %(default)s)")
    parser.add_argument(
        "--kills", type=int, default=0, help="of each session at most; 0: all but that before any token"
    )
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="sessions (default: %(default)s)")
    parser.set_defaults(harness=OF_NPM, case=CASES, runtime=("bubblewrap",))
    quick = {"harness": ["pi", "codex"], "case": ["task"], "tasks": 1, "kills": 2}
    options = parse(parser, quick=quick)
    result = Result("resume", LAWS, options)
    kills = show(options, result)
    make_console().print(table_of(kills, result))
    result.figures["kills"] = len(kills)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
