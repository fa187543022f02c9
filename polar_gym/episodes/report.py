"""Text for a person at a terminal: the summary of a run, and the traces token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from tokenizers import Tokenizer

from polar_gym.console import table
from polar_gym.engines import EngineError
from polar_gym.engines.local_tokenizer import local_tokenizer
from polar_gym.episodes.reading import read_episodes
from polar_gym.episodes.verify import Verification
from polar_gym.errors import ConfigError
from polar_gym.schema import Episode, Fidelity, Timing, Trace

MASKED_SHOWN = 600
"""Number of characters that are shown at each end of a long masked part."""


def print_summary(episodes: Sequence[Episode], console: Console) -> None:
    """Print tables with one row for each session (reward, counts, seconds), then the token counts of all sessions."""
    ordered = sorted(episodes, key=lambda episode: (episode.session.task_id, episode.session.sample_index))
    headings = ("reward", "calls", "traces", "sampled", "trainable", "excluded")
    stages = tuple(Timing().stages())
    worths, times = table("episodes", "task", *headings), table("seconds per stage", "task", *stages)
    for episode in ordered:
        worths.add_row(_name(episode), *_worth(episode))
        times.add_row(_name(episode), *_seconds(episode))
    console.print(worths, times)
    fidelities = [episode.trajectory.fidelity for episode in episodes]
    sampled, trainable = _total(fidelities, "sampled_tokens"), _total(fidelities, "trainable_tokens")
    excluded = sum(sum(fidelity.excluded.values()) for fidelity in fidelities)
    holds = "=" if sampled == trainable + excluded else "≠"
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    console.print(f"mean reward {mean} over {len(rewards)} of {len(episodes)} episodes")
    console.print(f"tokens: {sampled} sampled {holds} {trainable} trainable + {excluded} excluded")
    console.print(
        f"{_total(fidelities, 'calls')} calls in {_total(fidelities, 'traces')} traces; "
        f"per_request would give {_total(fidelities, 'traces_per_request')}"
    )
    causes = Counter(broken.cause for fidelity in fidelities for broken in fidelity.breaks)
    named = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    console.print(
        f"continuations: {_total(fidelities, 'spliced')} spliced, {_total(fidelities, 'canonical')} templated again "
        f"with the prefix intact, {causes.total()} broken{f' ({named})' if named else ''}"
    )
    attempts = Counter(attempt.status for episode in episodes for attempt in episode.trajectory.tool_attempts)
    counts = ", ".join(f"{count} {status}" for status, count in attempts.most_common())
    console.print(f"tool calls: {counts or 'none'}")
    if held := sum(episode.engine.own_grammar in ("tools", "all") for episode in episodes):
        console.print(
            f"{held} episodes are of an engine with a grammar of its own, which bends calls: sampling_mismatch"
        )
    if single := _total(fidelities, "single_tool_call"):
        console.print(f"{single} calls asked for one tool call at most; the engine was not told, so as to bend nothing")
    if edited := _total(fidelities, "edited_answers"):
        console.print(f"{edited} answers came back from the harness in other words; prompts kept the policy's own")
    if scores := [score for fidelity in fidelities for score in fidelity.scores]:
        spent = sum(score.read for score in scores if score.by == "engine") / _total(fidelities, "prefill")
        worst = max(scores, key=lambda score: score.mean_abs)
        problems = Counter(score.problem for score in scores)
        others = "".join(f"; {count} not: {problem}" for problem, count in problems.items() if problem)
        said = f"scored again: {problems[None]} times for {spent:.1%} of prefill, "
        console.print(f"{said}|Δ| of the worst: mean {worst.mean_abs:.2e}, max {worst.max_abs:.2e}{others}")


def _total(fidelities: Sequence[Fidelity], name: str) -> int:
    return sum(getattr(fidelity, name) for fidelity in fidelities)


def _name(episode: Episode) -> str:
    return f"{episode.session.task_id} #{episode.session.sample_index}"


def _worth(episode: Episode) -> list[str]:
    fidelity = episode.trajectory.fidelity
    reward = "failed" if episode.reward is None else f"{episode.reward:.2f}"
    excluded = ", ".join(f"{count} {reason}" for reason, count in fidelity.excluded.items()) or "0"
    counts = [fidelity.calls, fidelity.traces, fidelity.sampled_tokens, fidelity.trainable_tokens]
    return [reward, *map(str, counts), excluded]


def _seconds(episode: Episode) -> list[str]:
    return ["" if value is None else f"{value:.1f}" for value in episode.session.timing.stages().values()]


def inspect_file(file: Path, console: Console, *, only: int | None, tokenizer: str | None, full: bool) -> None:
    """Print the episodes of `file`. Raises `ConfigError` when it cannot be read or decoded."""
    number, shown = 0, only is None
    for number, episode in enumerate(read_episodes(file)):
        if only is not None and number != only:
            continue
        shown = True
        session = episode.session
        title = f"episode {number}: {session.task_id} #{session.sample_index}, {session.harness}, {session.status}"
        console.print(Rule(title, style="bold"))
        print_summary([episode], console)
        if session.failure is not None:
            console.print(
                Text(f"{session.failure.kind} while {session.failure.stage}: {session.failure.message}", "red")
            )
        if episode.evaluation is not None:
            console.print(Text(f"{episode.evaluation.evaluator}: {episode.evaluation.detail}"))
        decoder = _tokenizer(tokenizer or episode.engine.tokenizer)
        seen: set[str] = set()
        for trace in episode.trajectory.traces:
            versions = dict.fromkeys(span.version for span in trace.weight_versions)
            weights = f", weights {', '.join(versions)}" if versions else ""
            facts = f"{trace.kind}, {trace.trainable_tokens} trainable{weights}"
            console.print(Rule(f"trace {trace.trace_id} ({facts})", style="dim"))
            if why := why_it_begins(trace, seen, episode.trajectory.fidelity):
                console.print(Text(why, "yellow"))
            console.print(trace_text(trace, decoder, full=full))
            seen.update(trace.call_ids)
    if not shown:
        raise ConfigError(f"--episode={only}: {file} holds episodes 0 to {number}")


def why_it_begins(trace: Trace, seen: Set[str], fidelity: Fidelity) -> str:
    """Return why a trace forks from those whose calls were `seen`; "" for a conversation of its own."""
    new = next((call_id for call_id in trace.call_ids if call_id not in seen), None)
    for broken in fidelity.breaks:
        if broken.call_id == new:
            place = "" if broken.position is None else f" at position {broken.position}"
            return f"forks: the token prefix broke{place}: {broken.cause}"
    if shared := sum(call_id in seen for call_id in trace.call_ids):
        return f"forks after call {shared} of an earlier trace: the harness sent another continuation"
    return ""


def trace_text(trace: Trace, tokenizer: Tokenizer, *, full: bool) -> Text:
    """Return a trace as text: trainable tokens green in ⟦ ⟧, masked tokens dim, long masked parts cut in the middle."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    mask = np.concatenate([np.zeros(len(trace.prompt_ids), dtype=np.int8), trace.loss_mask])
    text = Text()
    for trained, positions in groupby(range(len(ids)), key=lambda position: int(mask[position])):
        span = list(positions)
        said = tokenizer.decode(ids[span[0] : span[-1] + 1].tolist(), skip_special_tokens=False)
        if trained:
            text.append(f"⟦{said}⟧", style="bold green")
        elif full or len(said) <= 2 * MASKED_SHOWN:
            text.append(said, style="dim")
        else:
            left_out = len(said) - 2 * MASKED_SHOWN
            text.append(said[:MASKED_SHOWN], style="dim")
            text.append(f"\n… {left_out} masked characters left out (--full shows them) …\n", style="italic yellow")
            text.append(said[-MASKED_SHOWN:], style="dim")
    return text


def _tokenizer(name: str | None) -> Tokenizer:
    """Return the tokenizer that decodes an episode. Raises `ConfigError`."""
    if name is None:
        raise ConfigError("the episodes name no tokenizer: give one with --tokenizer (a model directory)")
    try:
        return local_tokenizer("--tokenizer", name)
    except EngineError as error:
        raise ConfigError(error.message) from error


def print_verification(result: Verification, bound: float, console: Console) -> None:
    """Print the result of the exact test, then |captured - recomputed| logprobs for each way in which calls were
    compared."""
    console.print(f"exact: {result.exact} of {result.traces} traces hold what {result.calls} calls saw and sampled")
    for line in result.broken:
        console.print(Text(line, "red"))
    for way, arrays in result.compared.items():
        if any(map(len, arrays)):
            differences = np.concatenate(arrays)
            beyond = int((~(differences <= bound)).sum())  # NaN <= bound is false, so a NaN counts as beyond
            console.print(
                f"logprobs, {way}: {len(differences)} tokens, |Δ| mean {differences.mean():.2e}, "
                f"max {differences.max():.2e}, {beyond} beyond {bound:g}"
            )
    if result.not_comparable:
        console.print(
            f"not comparable: {result.not_comparable} tokens sampled at another temperature than 1, truncated or "
            "penalised (engine=embedded repeats temperatures and recorded sampling masks, but no penalties)"
        )
    if result.no_room:
        console.print(f"not compared: {result.no_room} tokens at the end of the engine's context")
