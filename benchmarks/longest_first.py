"""The time that a step would save if its longest tasks were placed first: `python -m benchmarks.longest_first`.

`--episodes FILE...` takes the seconds of each session's harness from recorded runs: each file is a step, and the files
before it are the history of its tasks. Without files, sessions are drawn: the logarithm of their seconds is normal, and
a share of its variance is the task's, which the history tells.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polar_gym.console import make_console, table
from polar_gym.episodes.reading import read_episodes

SHARES = (0.0, 0.2, 0.5, 0.8)
STEPS = ((8, 8, 16), (32, 16, 64), (64, 16, 256))
"""Tasks, samples of each, places."""
ROUNDS = 200
Step = Mapping[str, Sequence[float]]
"""Task -> seconds of its sessions."""


def seconds(sessions: Iterable[float], places: int) -> float:
    """Return how long a schedule takes that begins each session, in turn, as soon as a place is free."""
    free = [0.0] * places
    for each in sessions:
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free)


def saved(step: Step, history: Mapping[str, float], places: int) -> float:
    """Return the share of a step's time that longest-first saves, beside the service's way: a turn for each task."""
    most = max(map(len, step.values()))
    turns = [times[turn] for turn in range(most) for times in step.values() if turn < len(times)]
    by_history = sorted(step, key=lambda task: -history.get(task, float("inf")))
    return 1 - seconds((each for task in by_history for each in step[task]), places) / seconds(turns, places)


def recorded(files: Sequence[Path], places: int) -> list[tuple[str, int, float]]:
    """Return name, sessions and saved share of each step that has a history."""
    known, found = defaultdict[str, list[float]](list), list[tuple[str, int, float]]()
    for file in files:
        step = defaultdict[str, list[float]](list)
        for episode in read_episodes(file):
            if (running := episode.session.timing.running) is not None:
                step[episode.session.task_id].append(running)
        history = {task: float(np.mean(times)) for task, times in known.items()}
        if history and step:
            found.append((file.stem, sum(map(len, step.values())), saved(step, history, places)))
        for task, times in step.items():
            known[task] += times
    return found


def drawn(shape: tuple[int, int, int], sigma: float, share: float) -> float:
    """Return the mean saved share of steps whose sessions are drawn. The history is as many sessions of each task."""
    tasks, samples, places = shape
    random, found = np.random.default_rng(0), list[float]()
    for _ in range(ROUNDS):
        own = random.normal(0, sigma * np.sqrt(share), (tasks, 1))

        def session_times(own: NDArray[np.float64] = own) -> NDArray[np.float64]:
            return np.exp(own + random.normal(0, sigma * np.sqrt(1 - share), (tasks, samples)))

        step = {str(task): times.tolist() for task, times in enumerate(session_times())}
        history = {str(task): float(mean) for task, mean in enumerate(session_times().mean(axis=1))}
        found.append(saved(step, history, places))
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", nargs="*", type=Path, default=[], help="files of episodes, a step each, in order")
    parser.add_argument("--places", type=int, default=16, help="of a recorded step (default: %(default)s)")
    options = parser.parse_args()
    if options.episodes:
        shown = table("recorded steps", "step", "sessions", "time saved")
        for name, count, share in recorded(options.episodes, options.places):
            shown.add_row(name, str(count), f"{share:.1%}")
    else:
        headings = (f"{share:.0%} the task's" for share in SHARES)
        shown = table("drawn sessions", "tasks x samples, places, sigma", *headings)
        for shape in STEPS:
            for sigma in (0.2, 0.6, 1.0):
                named = f"{shape[0]} x {shape[1]}, {shape[2]}, {sigma}"
                shown.add_row(named, *(f"{drawn(shape, sigma, share):.1%}" for share in SHARES))
    make_console().print(shown)


if __name__ == "__main__":
    main()
