"""Tables about a dataset for a person: the accepted attempts by repository, and the sizes of the examples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, median

from rich.table import Table

from polar_gym.console import table
from polar_gym.export.ledger import EpisodeEntry, ExampleEntry


def acceptance_table(entries: Sequence[EpisodeEntry]) -> Table:
    """Return a table with one row for each repository, and the sum of all.

    The columns: attempts, accepted, rate, seconds of the harness in all attempts for each accepted one, turns (the
    policy's answers in the examples of an accepted attempt, in the mean), examples, examples for validation, and why
    the other attempts were refused.
    """
    by_repo: defaultdict[str, list[EpisodeEntry]] = defaultdict(list)
    for entry in entries:
        by_repo[entry.repo].append(entry)
    shown = Table(title="accepted trajectories", title_justify="left", show_footer=len(by_repo) > 1)
    cells = _acceptance(entries)
    shown.add_column("repository", "all", overflow="fold")
    headings = ("attempts", "accepted", "rate", "s each", "turns", "examples", "validation")
    for heading, footer in zip(headings, cells, strict=False):
        shown.add_column(heading, footer, justify="right")
    shown.add_column("refused", cells[-1], overflow="fold")
    for repo in sorted(by_repo):
        shown.add_row(repo, *_acceptance(by_repo[repo]))
    return shown


def statistics_table(entries: Sequence[EpisodeEntry]) -> Table:
    """Return a table of the messages, turns and tokens of the examples."""
    examples = list(_examples(entries))
    shown = table(f"{len(examples)} examples", "", "mean", "median", "min", "max", "sum")
    for name in ("messages", "turns", "tokens", "trainable_tokens"):
        values = [getattr(example, name) for example in examples]
        if values:
            figures = [f"{mean(values):.1f}", f"{median(values):g}", *map(str, (min(values), max(values), sum(values)))]
            shown.add_row(name.replace("_", " "), *figures)
    return shown


def splits_line(entries: Sequence[EpisodeEntry]) -> str:
    examples = Counter(example.split for example in _examples(entries))
    tasks = Counter(split for _, split in {(entry.task_id, each.split) for entry in entries for each in entry.examples})
    return "; ".join(f"{split}: {examples[split]} examples of {tasks[split]} tasks" for split in sorted(examples))


def _examples(entries: Sequence[EpisodeEntry]) -> Iterator[ExampleEntry]:
    return (example for entry in entries for example in entry.examples)


def _acceptance(entries: Sequence[EpisodeEntry]) -> list[str]:
    accepted = [entry for entry in entries if entry.refused is None]
    refused = Counter(entry.refused for entry in entries if entry.refused is not None)
    left_out = Counter[str]()
    for entry in entries:
        left_out.update(entry.left_out)
    reasons = [f"{count} {reason}" for reason, count in refused.most_common()]
    reasons += [f"{count} traces: {reason}" for reason, count in left_out.most_common()]
    counts = [str(len(entries)), str(len(accepted)), f"{len(accepted) / len(entries):.0%}" if entries else ""]
    counts.append(f"{sum(entry.seconds for entry in entries) / len(accepted):.1f}" if accepted else "")
    turns = [sum(example.turns for example in entry.examples) for entry in accepted]
    counts.append(f"{mean(turns):.1f}" if turns else "")
    splits = Counter(example.split for example in _examples(entries))
    return [*counts, str(splits.total()), str(splits["validation"]), ", ".join(reasons)]
